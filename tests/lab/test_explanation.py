"""What Inductor's passes are seen to do: a pass of one's own appears, one that is switched off does not."""

from __future__ import annotations

import json
import linecache
from pathlib import Path

import pytest
import torch
from on_ranks import small
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from workbench import load_recipe
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.lab.inside_inductor import inductor_passes

pytestmark = pytest.mark.integration

RECIPE = load_recipe("llama3_full_inductor").override({
    "mesh.dp_shard": 1, "mesh.tp": 2, "model.n_layers": 1, "data.seq_len": 16})
TORCH = Path(torch.__file__).parent.parent


@pytest.fixture(scope="module")
def explanation():
    return inductor_passes(RECIPE)


def on(explanation, graph):
    return {p.name: p for p in explanation.passes if p.graph == graph}


def test_each_stage_on_its_graph_and_what_it_changed(explanation):
    import torch._inductor.compile_fx as compile_fx

    assert {(p.graph, p.stage) for p in explanation.passes} == {
        ("module", "pre-grad"), ("joint", "joint-graph"), ("forward", "post-grad"), ("backward", "post-grad")}
    for p in explanation.passes:
        if p.where:
            path, line = p.where.rsplit(":", 1)
            lines = "".join(linecache.getline(str(TORCH / path), int(line) + i) for i in range(4))
            assert "def " in lines or "lambda " in lines, p.where
        assert p.nodes[1] - p.nodes[0] == sum(p.added.values()) - sum(p.removed.values())
    views = on(explanation, "joint")["remove_noop_ops"]
    assert views.removed["aten.view"] > 0 and not views.added
    assert "_c10d_functional.all_reduce_" in on(explanation, "backward")["reinplace_inplaceable_ops"].added
    assert any(p.matched for p in explanation.passes)
    assert views.where.startswith("torch/_inductor/fx_passes/post_grad.py:")
    assert GraphTransformObserver.__enter__.__name__ == "__enter__"  # nothing is left watching
    assert compile_fx.GraphLowering.__name__ == "GraphLowering"


def drop_nothing(graph: torch.fx.Graph) -> None:
    """A pass of one's own, at the end of Inductor's."""


def test_a_pass_of_ones_own_is_seen(explanation):
    import torch._inductor.config as config

    with config.patch(post_grad_custom_post_pass=drop_nothing):
        mine = explanation.again({}, ["forward", "backward"])
    for graph in ("forward", "backward"):
        own = on(mine, graph)["post_grad_custom_post_pass"]
        assert own.where == f"{Path(__file__).name}:{drop_nothing.__code__.co_firstlineno}" and not own.changed


def test_the_same_graphs_again_and_without_a_pass(explanation):
    sizes = [len(graph.graph.nodes) for graph in explanation.pair.graphs]
    again = explanation.again({})
    assert [(p.name, p.nodes) for p in again.passes] == [
        (p.name, p.nodes) for p in explanation.passes if p.graph != "module"]
    joint = explanation.again({"disabled_passes": "remove_noop_ops"}, ["joint"])
    assert on(explanation, "joint").keys() - on(joint, "joint").keys() == {"remove_noop_ops"}
    assert "joint-graph" in joint.table() and "grad, on" not in joint.table()
    assert sizes == [len(graph.graph.nodes) for graph in explanation.pair.graphs]  # Inductor worked on copies
    with pytest.raises(WorkbenchError, match="Inductor has no option 'zzz'"):
        explanation.again({"zzz": 1})


@pytest.mark.nightly
def test_passes_that_leave_no_graph_are_left_out_and_told():
    recipe = load_recipe("llama3_flex_block_bucketing_regional_cudagraph").override({
        "mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 1, "data.seq_len": 16})
    explanation = inductor_passes(recipe)
    assert explanation.left_out == ("regional_inductor", "cudagraph")
    assert "left out, since they leave Inductor no graph: regional_inductor, cudagraph" in explanation.table()


@pytest.mark.nightly
def test_command_line(capsys, tmp_path):
    args = ["explain", "llama3", "--set", "mesh.dp_shard=2", "mesh.tp=1", "model.n_layers=1", "data.seq_len=16"]
    assert main([*args, "--changed", "--json", str(tmp_path / "x.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama3, torch ") and "post-grad, on the recipe's backward graph" in text
    assert max(map(len, text.splitlines())) <= 120
    data = json.loads((tmp_path / "x.json").read_text())
    assert len(data["passes"]) > 20 and data["recipe"]["mesh"]["dp_shard"] == 2


def test_what_cannot_be_explained(capsys):
    assert main(["explain", "llama3", "--config", "joint_graph_constant_foldin=false"]) == 2
    assert "explain: Inductor has no option 'joint_graph_constant_foldin': did you mean " in capsys.readouterr().err
    with pytest.raises(WorkbenchError, match="Inductor's option 'max_autotune' is true or false, and not 'flase'"):
        inductor_passes(RECIPE, config={"max_autotune": "flase"})
    whole = small({"dp_shard": 2, "tp": 2}, (), ("transformer_block_bucketing",)).override({"training.step": "whole"})
    with pytest.raises(WorkbenchError, match="and recipe 'small' joins them: set training.step to \"pair\""):
        inductor_passes(whole)
