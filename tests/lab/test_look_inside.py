"""What Inductor makes of small functions, and what its passes do: each fact is seen to change with its cause."""

from pathlib import Path

import pytest
import torch
from on_ranks import small
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from workbench import WorkbenchError, load_recipe
from workbench.authoring.models.layers import FeedForward
from workbench.cli import main
from workbench.lab.inside_inductor import inductor_passes, look_inside, watched
from workbench_lessons.l12_inside_inductor.buffers import buffers_of, read_buffers

pytestmark = pytest.mark.integration
TOKENS, DIM, HIDDEN = 64, 128, 384
X, SQUARE = torch.randn(TOKENS, DIM), torch.randn(DIM, DIM)


@pytest.fixture(scope="module")
def two():
    return nn.Sequential(FeedForward(DIM, HIDDEN), FeedForward(DIM, HIDDEN))


def test_options_change_the_memory_as_under_torch_compile(two, monkeypatch):
    """What the options change, and a node that eager computes: notebook 12."""
    config = {"inplace_buffers": False, "allow_buffer_reuse": False}
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *given: None)  # its kernels compute nothing
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    with watched() as graphs, torch.no_grad():
        torch.compile(two, options=config)(X)
    (theirs,) = graphs
    ours = look_inside(two, X, config=config)
    assert len(graphs) == 1  # what is compiled behind the block is not watched
    memory = buffers_of(ours)
    assert memory == read_buffers(theirs.code, theirs.sizes)
    assert (len(memory.buffers), memory.allocations, memory.peak) == (8, 8, 294_912)
    assert ours.estimate == theirs.estimate


def test_bad_input_word_for_word():
    for function, options, told in [
        (torch.relu, {"eager": ["rellu"]}, "eager: the graph has no operator node 'rellu'; did you mean 'relu'?"),
        (torch.relu, {"config": {"memory_plan": True}},
         "Inductor has no option 'memory_plan': did you mean 'memory_planning'?"),
        (lambda x: x.add_(1), {}, "the function changes an input or a buffer: give one that returns new tensors"),
    ]:
        with pytest.raises(WorkbenchError) as caught:
            look_inside(function, X, **options)
        assert str(caught.value) == f"look_inside: {told}"


def test_a_backend_gets_the_wrapper_and_leaves_no_trace():
    from torch._inductor.codegen import common

    common.init_backend_registration()
    before, got = dict(common.device_codegens), []
    seen = look_inside(lambda x, w: x @ w @ w, X, SQUARE, backend=lambda graph: got.append(graph) or graph.forward)
    assert [n.target.__name__ for n in seen.wrapper.graph.nodes if n.op == "call_function"] == [
        "empty_strided", "mm.out"] * 2
    assert got == [seen.wrapper] and torch.equal(seen(X, SQUARE), X @ SQUARE @ SQUARE)
    assert common.device_codegens == before
    assert look_inside(lambda x, w: x @ w, X, SQUARE).wrapper is None


def test_parts_and_why_not(monkeypatch, two):
    from torch._inductor.scheduler import Scheduler

    config = {"triton.cudagraphs": True, "graph_partition": True}
    (whole,) = look_inside(two, X, config=config).parts
    assert (whole.recorded, whole.why_not, len(whole.steps)) == (False, ("cpu ops",), 8)
    assert look_inside(two, X, config={"graph_partition": False}).parts == ()
    # as on a GPU, where only what the host must do stands between
    monkeypatch.setattr(Scheduler, "should_partition",
                        lambda self, node: "copies" if "op2" in node.get_name() else None)
    parts = look_inside(two, X, config=config).parts
    assert [(p.recorded, p.why_not) for p in parts] == [(True, ()), (False, ("copies",)), (True, ())]
    assert [len(p.steps) for p in parts] == [2, 1, 5]


# What Inductor's passes are seen to do: a user's pass appears, and one that is switched off does not.

RECIPE = load_recipe("llama3_full_inductor").override({
    "mesh.dp_shard": 1, "mesh.tp": 2, "model.n_layers": 1, "data.seq_len": 16})


@pytest.fixture(scope="module")
def explanation():
    return inductor_passes(RECIPE)


def on(explanation, graph):
    return {p.name: p for p in explanation.passes if p.graph == graph}


def test_each_stage_on_its_graph_and_what_it_changed(explanation):
    assert {(p.graph, p.stage) for p in explanation.passes} == {
        ("module", "pre-grad"), ("joint", "joint-graph"), ("forward", "post-grad"), ("backward", "post-grad")}
    for p in explanation.passes:
        assert p.nodes[1] - p.nodes[0] == sum(p.added.values()) - sum(p.removed.values())
    assert "_c10d_functional.all_reduce_" in on(explanation, "backward")["reinplace_inplaceable_ops"].added
    assert any(p.matched for p in explanation.passes)


def drop_nothing(graph: torch.fx.Graph) -> None:
    """A user's pass, at the end of Inductor's."""


def test_a_pass_of_ones_own_is_seen_and_one_that_is_disabled_is_missing(explanation):
    sizes = [len(graph.graph.nodes) for graph in explanation.pair.graphs]
    with torch._inductor.config.patch(post_grad_custom_post_pass=drop_nothing):
        changed = inductor_passes(RECIPE, config={"disabled_passes": "remove_noop_ops"})
    for graph in ("forward", "backward"):
        own = on(changed, graph)["post_grad_custom_post_pass"]
        assert own.where == f"{Path(__file__).name}:{drop_nothing.__code__.co_firstlineno}" and not own.changed
    assert on(explanation, "joint").keys() - on(changed, "joint").keys() == {"remove_noop_ops"}
    assert sizes == [len(graph.graph.nodes) for graph in changed.pair.graphs]  # Inductor worked on copies


@pytest.mark.nightly
def test_passes_that_leave_no_graph_are_left_out_and_told():
    recipe = load_recipe("llama3_flex_block_bucketing_regional_cudagraph").override({
        "mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 1, "data.seq_len": 16})
    explanation = inductor_passes(recipe)
    assert explanation.left_out == ("regional_inductor", "cudagraph")
    assert "left out, since they leave Inductor no graph: regional_inductor, cudagraph" in explanation.table()


def test_what_cannot_be_explained(capsys):
    assert main(["explain", "llama3", "--config", "joint_graph_constant_foldin=false"]) == 2
    assert "explain: Inductor has no option 'joint_graph_constant_foldin': did you mean " in capsys.readouterr().err
    with pytest.raises(WorkbenchError, match="Inductor's option 'max_autotune' is true or false, and not 'flase'"):
        inductor_passes(RECIPE, config={"max_autotune": "flase"})
    whole = small({"dp_shard": 2, "tp": 2}, (), ("transformer_block_bucketing",)).override({"training.step": "whole"})
    with pytest.raises(WorkbenchError, match="and recipe 'small' joins them: set training.step to \"pair\""):
        inductor_passes(whole)
