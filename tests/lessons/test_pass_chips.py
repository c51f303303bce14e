"""Every list of a small recipe's passes: what runs is what the study finds, what is refused is what the recipe says."""

import pytest
from unpacked import unpacked

from workbench import WorkbenchError, fake_world, load_recipe, what_if
from workbench.recipe.recipe import RecipeError
from workbench_lessons.l00_tour.pass_chips import PassChips

pytestmark = pytest.mark.integration
JOINT, LATER = ["reshard_after_forward"], ["transformer_block_bucketing"]


@pytest.fixture(scope="module")
def study():
    recipe = load_recipe("tour").override({"model.n_layers": 1, "mesh.tp": 1, "joint_passes": [], "passes": []})
    with fake_world(2) as world:
        yield what_if(recipe, world)


@pytest.fixture(scope="module")
def recipe(study):
    return study.recipe.override({"joint_passes": JOINT, "passes": LATER})


@pytest.fixture(scope="module")
def chips(study, recipe):
    return PassChips(study, recipe)


def test_every_order_is_there_and_legal_ones_have_run(chips, study):
    assert len(chips.runs) == 1 + 2 * 2 + 2 * 3
    ran = {lists for lists, run in chips.runs.items() if "figures" in run}
    assert ran == {(joint, later) for joint in [(), tuple(JOINT)] for later in [(), tuple(LATER)]}
    assert not study.recipe.joint_passes and not study.recipe.passes  # as it was


def test_figures_and_verdicts_are_the_studys(chips, study):
    found = study.change(joint_passes=JOINT, passes=LATER).after
    study.revert()
    chips.set(JOINT, LATER)
    assert chips.figures == {
        "launches": sum(found.figures.launches.values()), "bytes saved": found.figures.saved,
        "peak bytes": max(found.figures.peaks.values()), "step ms": round(found.figures.step_ms, 2)}
    run = unpacked(chips.data)["runs"][f"{JOINT[0]}|{LATER[0]}"]
    assert run["figures"] == chips.figures
    cells = {name: dict(zip(run["checks"], row, strict=True)) for name, row in run["verdicts"].items()}
    assert set(cells) == set(found.verdicts)
    assert all(cells[name][v.check] == v.outcome for name, verdicts in found.verdicts.items() for v in verdicts)


@pytest.mark.parametrize(("joint", "later"), [([*LATER, *JOINT], []), ([], [*LATER, *JOINT])])
def test_an_illegal_list_gets_the_recipe_checks_words(chips, recipe, joint, later):
    with pytest.raises(RecipeError) as refused:
        recipe.override({"joint_passes": joint, "passes": later})
    chips.set(joint, later)
    assert chips.figures == {}
    wanted = [": ".join(each) for each in refused.value.problems]
    assert chips.message.splitlines() == wanted and wanted
    assert unpacked(chips.data)["runs"][f"{' '.join(joint)}|{' '.join(later)}"] == {"refused": wanted}


def test_a_long_recipe_is_refused(study):
    joint = ["inductor_decomposition", "activation_checkpointing", *JOINT]
    with pytest.raises(WorkbenchError, match="recipe 'tour' has 5 passes: every list of them is recorded, so give"):
        PassChips(study, study.recipe.override({"joint_passes": joint, "passes": [*LATER, "graph_cleanup"]}))
