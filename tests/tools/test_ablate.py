"""Variants of a recipe beside it: which there are, what is noise, and what a run leaves to be gone on from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook import draw
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.tools.ablate import Ablation, Row, _row, ablate, variants
from workbench.tools.matrix import Entry
from workbench.tools.own_files import import_file

TOUR = load_recipe("tour")


def test_each_pass_is_left_out_and_each_two_neighbours_are_swapped():
    found = variants(TOUR)
    names = {name: r.pass_names for name, r in found.items() if isinstance(r, Recipe)}
    decompose, checkpoint, reshard, bucket = TOUR.pass_names
    assert names["tour"] == TOUR.pass_names
    assert names[f"without {reshard}"] == (decompose, checkpoint, bucket)
    assert names[f"{reshard} before {checkpoint}"] == (decompose, reshard, checkpoint, bucket)
    assert found[f"{bucket} before {reshard}"] == (
        f"pass {bucket!r} runs on the partitioned stage: move it from joint_passes to passes")
    assert len(found) == 1 + 4 + 2 + 1


def test_what_another_pass_needs_is_not_left_out():
    found = variants(load_recipe("llama3_full_inductor"))
    assert found["without inductor_decomposition"] == (
        "pass 'full_inductor_compilation' requires 'inductor_decomposition': add it to joint_passes, before it")


def test_options_are_tried_and_a_wrong_one_is_told():
    key = "transformer_block_bucketing.separate_gather_group"
    found = variants(TOUR, {key: [False], "activation_checkpointing.policy": ["full", "half"]})
    assert found[f"{key} = False"].passes[0].options == {"separate_gather_group": False}
    assert "'half'" in found["activation_checkpointing.policy = half"]
    for wrong in ("overlap_collectives.horizon", "activation_checkpointing"):
        with pytest.raises(WorkbenchError, match=f"vary '{wrong}': name a pass of recipe 'tour' and its option"):
            variants(TOUR, {wrong: [1]})
    with pytest.raises(WorkbenchError, match="has no such option; did you mean 'buckets'"):
        variants(TOUR, {"transformer_block_bucketing.bucket": [1]})
    with pytest.raises(WorkbenchError, match="recipe 'llama3' has no passes"):
        variants(load_recipe("llama3"), {"activation_checkpointing.policy": ["full"]})


def test_order_is_free_only_where_the_recipe_says_so():
    swapped = [spec.as_toml() for spec in (TOUR.joint_passes[0], TOUR.joint_passes[2], TOUR.joint_passes[1])]
    with pytest.raises(WorkbenchError, match="must come before"):
        TOUR.override({"joint_passes": swapped})
    assert TOUR.override({"joint_passes": swapped, "free_order": True}).pass_names[1] == "reshard_after_forward"


def row(name: str, *steps: float) -> Row:
    return Row(name, steps, 1000, 7, "PASS")


def test_a_difference_counts_where_the_bands_are_apart():
    found = Ablation("r", "2 gloo ranks", 3, (
        row("r", 100, 110, 104), row("without a", 113, 112, 120), row("without b", 130, 131, 132),
        row("without c", 80, 81, 82), Row("b before a", problem="a rule")))
    assert [found.compared(r) for r in found.rows] == ["", "within noise", "+27.0 ms", "-23.0 ms", ""]
    assert repr(found).splitlines()[-1] == "b before a did not run: a rule"
    once = Ablation("r", "2 gloo ranks", 1, (row("r", 100.0), row("without a", 50.0)))
    assert repr(once).startswith("r on 2 gloo ranks, 1 run each\n") and "±" in repr(found) and "±" not in repr(once)
    assert once.compared(once.rows[1]) == "-50.0 ms, noise unknown: one run of each"
    picture = draw.ablation(found)
    assert picture.text.splitlines()[1:3] == ["r: 1,000 bytes saved, 7 collectives, PASS",
                                              "without a: 1,000 bytes saved, 7 collectives, PASS"]
    with pytest.raises(ValueError, match="did not run, so there is nothing to compare with: a rule"):
        draw.ablation(Ablation("r", "gloo", 3, (Row("r", problem="a rule"),)))


def test_runs_that_failed_are_told_and_one_run_knows_no_noise():
    ran = {"median_step_seconds": 0.12, "saved_bytes": 1, "ok": True, "passes": [], "schedule": {
        "evidence": {"collectives": 3}}}
    part = _row("without a", [Entry("a", ran), Entry("a", None, "out of memory"), Entry("a", None, "out of memory")])
    found = Ablation("r", "2 gloo ranks", 3, (row("r", 100, 110, 104), part))
    assert found.compared(part) == "+16.0 ms, noise unknown: one run of one"
    assert repr(found).splitlines()[-1] == "without a: 2 of 3 runs failed: out of memory"
    assert draw.ablation(found).text.splitlines()[-1] == "without a (1 of 3 runs): 1 bytes saved, 3 collectives, PASS"
    assert "without a  120.0  " in repr(found)


def test_what_is_expected_of_a_pass_goes_with_it():
    name = "activation_checkpointing"
    found = variants(TOUR.override({"expect.no_effect": [name]}))
    without = found[f"without {name}"]
    assert isinstance(without, Recipe) and without.expect.no_effect == ()


IDLE_VIEWS = """
import torch
from workbench import register_pass


@register_pass("idle_views", stage="joint", changes="no view that changes nothing")
def idle_views(gm, example_inputs, *, options):
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        if node.meta["val"].shape == node.args[0].meta["val"].shape:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    return gm
"""


@pytest.fixture
def without_views(tmp_path, monkeypatch):
    """A pass of the user's."""
    from workbench.passes import registry
    from workbench.recipe.contracts import CONTRACTS

    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "idle_views_file.py"
    file.write_text(IDLE_VIEWS)
    import_file(file)
    yield "idle_views"
    sys.modules.pop(file.stem), CONTRACTS.pop("idle_views"), registry._PASSES.pop("idle_views")


@pytest.mark.nightly
@pytest.mark.ranks
def test_a_pass_of_ones_own_goes_to_the_runs(tmp_path: Path, without_views: str):
    recipe = load_recipe("llama3").override({
        "mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 1, "data.seq_len": 16, "training.steps": 3,
        "joint_passes": [without_views]})
    found = ablate(recipe, tmp_path, world="gloo", repeats=1)
    assert [(r.name, bool(r.steps), r.verdicts) for r in found.rows] == [
        ("llama3", True, "PASS"), (f"without {without_views}", True, "PASS")], found
    (tmp_path / "own_passes.py").write_text("other = 1\n")
    with pytest.raises(WorkbenchError, match="holds another version of your passes, with its runs: use another"):
        ablate(recipe, tmp_path, world="gloo", repeats=1)


@pytest.mark.nightly
@pytest.mark.ranks
def test_runs_are_kept_and_an_order_shows_its_effect(tmp_path: Path):
    """Checkpointing after reshard forgets what reshard asked for: more is saved, and reshard's verdict says so."""
    recipe = load_recipe("llama3").override({
        "mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 1, "data.seq_len": 16, "training.steps": 3,
        "joint_passes": ["activation_checkpointing", "reshard_after_forward"]})
    told: list[str] = []
    found = ablate(recipe, tmp_path, world="gloo", repeats=1, tell=told.append)
    assert len(told) == len(found.rows) == 4 and all(r.steps for r in found.rows)
    rows = {r.name: r for r in found.rows}
    assert rows["llama3"].saved < rows["without reshard_after_forward"].saved
    again = ablate(recipe, tmp_path, world="gloo", repeats=1, tell=told.append)
    assert again == found and len(told) == 4
