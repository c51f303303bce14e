"""A change in pictures: what changed is said with both sides, what did not is not, and no second stands in the text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from workbench import fake_world, load_recipe, what_if
from workbench.checks.verdicts import Outcome, Verdict
from workbench.notebook.draw import difference, verdicts_of_both
from workbench.notebook.show import outputs

pytestmark = pytest.mark.integration
RECIPE = load_recipe("tour").override({"model.n_layers": 1})


@pytest.fixture(scope="module")
def study():
    with fake_world(RECIPE.mesh.world_size) as world:
        found = what_if(RECIPE, world)
        found.change({"joint_passes.reshard_after_forward.policy": "never"})
        found.change(passes=[])
        found.change({"about": "the same"})
    return found


def test_every_figure_that_changed_stands_in_the_text_with_both_sides(study):
    found = study.history[0]
    said = difference(found).text.splitlines()
    assert said[0] == "what if: joint_passes.reshard_after_forward.policy: not set -> never"
    assert said[1] == "ran again: reshard_after_forward, partition, transformer_block_bucketing"
    assert said[2] == "kept: author, capture, inductor_decomposition, activation_checkpointing"
    wanted = {name: (a, b) for name, a, b, change in found.rows() if re.fullmatch(r"[-+][\d,.]+", change) and a != b}
    assert wanted and dict(line.split(": ")[-2:] for line in said[3:]) == {
        name.split(": ")[-1]: f"{a} → {b}" for name, (a, b) in wanted.items()}
    assert f"saved, bytes: {found.before.figures.saved:,} → {found.after.figures.saved:,}" in "\n".join(said)


def test_no_measured_second_is_in_what_nbval_compares(study):
    found = study.history[0]
    slow = replace(found, seconds=99.0, ran=dict.fromkeys(found.ran, 99.0))
    assert [repr(each) for each in outputs(slow)] == [repr(each) for each in outputs(found)]


def test_a_verdict_that_turned_is_shown_with_its_reason(study):
    found = study.history[0]
    name = "reshard_after_forward"
    failed = {**found.after.verdicts, name: (Verdict("effect", Outcome.FAIL, "a gathered weight is saved"),)}
    table = verdicts_of_both(replace(found, after=replace(found.after, verdicts=failed)))
    assert dict(zip(table.columns, next(r for r in table.rows if r[0] == name), strict=True))["effect"] == "PASS → FAIL"
    assert table.notes[-1] == f"after, {name}: effect: FAIL, a gathered weight is saved"
