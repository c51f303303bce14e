"""What Inductor's passes are seen to do: a pass of one's own appears, one that is switched off does not."""

from __future__ import annotations

import json
import linecache
import sys
from pathlib import Path

import pytest
import torch

from workbench import inductor_passes, load_recipe
from workbench.cli import main
from workbench.errors import WorkbenchError

pytestmark = pytest.mark.integration

RECIPE = load_recipe("llama3_full_inductor_block_bucketing").override({
    "mesh.dp_shard": 2, "mesh.tp": 2, "model.n_layers": 1, "data.seq_len": 16})
TORCH = Path(torch.__file__).parent.parent


@pytest.fixture(scope="module")
def found():
    return inductor_passes(RECIPE)


def on(found, graph):
    return {p.name: p for p in found.passes if p.graph == graph}


def test_each_stage_on_its_graph(found):
    stages = {(p.graph, p.stage) for p in found.passes}
    assert stages == {("module", "pre-grad"), ("joint", "joint-graph"), ("forward", "post-grad"),
                      ("backward", "post-grad")}
    for p in found.passes:
        path, line = p.where.rsplit(":", 1)
        assert "def " in "".join(linecache.getline(str(TORCH / path), int(line) + i) for i in range(4)), p.where
        assert p.changed or p.nodes[0] == p.nodes[1]
    assert sum(p.changed for p in found.passes) >= 4


def test_what_changed_is_what_the_graph_lost_and_gained(found):
    views = on(found, "joint")["remove_noop_ops"]
    assert views.removed["aten.view"] > 0 and not views.added
    assert views.nodes[1] - views.nodes[0] == -sum(views.removed.values())
    for p in found.passes:
        assert p.nodes[1] - p.nodes[0] == sum(p.added.values()) - sum(p.removed.values())
    assert "_c10d_functional.all_reduce_" in on(found, "backward")["reinplace_inplaceable_ops"].added
    assert any(p.matched for p in found.passes)


def drop_nothing(graph: torch.fx.Graph) -> None:
    """A pass of one's own, at the end of Inductor's."""


def test_a_pass_of_ones_own_is_seen(found):
    import torch._inductor.config as config

    with config.patch(post_grad_custom_post_pass=drop_nothing):
        mine = found.again({}, ["forward", "backward"])
    for graph in ("forward", "backward"):
        own = on(mine, graph)["post_grad_custom_post_pass: drop_nothing"]
        assert own.where == f"{Path(__file__).name}:{drop_nothing.__code__.co_firstlineno}" and not own.changed


@pytest.mark.nightly
def test_a_pass_that_is_switched_off_disappears(found):
    assert "constant_fold_uniform_value" in on(found, "joint") and "remove_noop_ops" in on(found, "forward")
    off = inductor_passes(RECIPE, config={"joint_graph_constant_folding": False,
                                          "disabled_passes": "remove_noop_ops"})
    assert "constant_fold_uniform_value" not in on(off, "joint")
    assert not [p for p in off.passes if p.name == "remove_noop_ops"]
    assert len(off.passes) == len(found.passes) - 4  # in all three graphs


@pytest.mark.nightly
def test_the_same_graphs_again_and_one_of_them_alone(found):
    sizes = [len(graph.graph.nodes) for graph in found.pair.graphs]
    again = found.again({})
    assert [(p.name, p.nodes) for p in again.passes] == [(p.name, p.nodes) for p in found.passes if p.graph != "module"]
    joint = found.again({"disabled_passes": "remove_noop_ops"}, ["joint"])
    gone = {p.name for p in found.passes if p.graph == "joint"} - {p.name for p in joint.passes}
    assert gone == {"remove_noop_ops"} and {p.graph for p in joint.passes} == {"joint"}
    assert "joint-graph" in joint.table() and "grad, on" not in joint.table()
    assert sizes == [len(graph.graph.nodes) for graph in found.pair.graphs]  # Inductor worked on copies
    with pytest.raises(WorkbenchError, match="graph 'module' was not captured: take joint, forward or backward"):
        found.again({}, ["module"])
    with pytest.raises(WorkbenchError, match="Inductor has no option 'zzz'"):
        found.again({"zzz": 1})


def test_nothing_is_left_watching(found):
    import torch._inductor.compile_fx as compile_fx

    assert sys.gettrace() is None or "coverage" in str(sys.gettrace())
    assert not hasattr(compile_fx.post_grad_passes, "__wrapped__")
    assert compile_fx.GraphLowering.__name__ == "GraphLowering"


@pytest.mark.nightly
def test_passes_that_leave_no_graph_are_left_out_and_told():
    recipe = load_recipe("llama3_flex_block_bucketing_regional_cudagraph").override({
        "mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 1, "data.seq_len": 16})
    found = inductor_passes(recipe)
    assert found.left_out == ("regional_inductor", "cudagraph")
    assert "left out, since they leave Inductor no graph: regional_inductor, cudagraph" in found.table()


@pytest.mark.nightly
def test_command_line(capsys, tmp_path):
    args = ["explain", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", "model.n_layers=1", "data.seq_len=16"]
    assert main([*args, "--changed", "--json", str(tmp_path / "x.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama3, torch ") and "post-grad, on the recipe's backward graph" in text
    assert max(map(len, text.splitlines())) <= 120
    data = json.loads((tmp_path / "x.json").read_text())
    assert len(data["passes"]) > 20 and data["recipe"]["mesh"]["dp_shard"] == 2
    assert main([*args, "--config", "joint_graph_constant_foldin=false"]) == 2
    assert "explain: Inductor has no option 'joint_graph_constant_foldin': did you mean " in capsys.readouterr().err


def test_unknown_option():
    with pytest.raises(WorkbenchError, match="Inductor has no option 'zzz'"):
        inductor_passes(RECIPE, config={"zzz": 1})
    with pytest.raises(WorkbenchError, match="Inductor's option 'max_autotune' is true or false, and not 'flase'"):
        inductor_passes(RECIPE, config={"max_autotune": "flase"})
