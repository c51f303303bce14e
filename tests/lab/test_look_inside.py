"""What Inductor makes of small functions; each fact is seen to change with its cause. No kernel is compiled here."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile

from workbench.authoring.models.layers import FeedForward
from workbench.errors import WorkbenchError
from workbench.lab.inside_inductor import look_inside, watched
from workbench_lessons.l12_inside_inductor.buffers import buffers_of, read_buffers

pytestmark = pytest.mark.integration
TOKENS, DIM, HIDDEN = 64, 128, 384
X, SQUARE = torch.randn(TOKENS, DIM), torch.randn(DIM, DIM)


@pytest.fixture(scope="module")
def two():
    return nn.Sequential(FeedForward(DIM, HIDDEN), FeedForward(DIM, HIDDEN))


def raised(*args, **kwargs):
    with pytest.raises(WorkbenchError) as caught:
        look_inside(*args, **kwargs)
    return str(caught.value)


def test_kernels_know_their_nodes_and_lines():
    def function(x, w):
        wide = x @ w
        gated = torch.tanh(wide) * 2
        return gated - wide

    seen = look_inside(function, X, SQUARE)
    first, second = seen.kernels.kernels
    assert (first.kind, seen.lines(first)) == ("extern", ("wide = x @ w",))
    assert (second.kind, second.nodes) == ("cpp", ("tanh", "mul", "sub"))
    assert seen.lines(second) == ("gated = torch.tanh(wide) * 2", "return gated - wide")
    assert not seen.kernels.not_found and not seen.kernels.missing


@pytest.mark.parametrize(("config", "allocations", "peak"), [
    ({}, 4, 229_376), ({"inplace_buffers": False, "allow_buffer_reuse": False}, 8, 294_912),
    ({"memory_planning": True}, 2, 229_376)])
def test_options_change_the_memory_as_under_torch_compile(two, config, allocations, peak, monkeypatch):
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *given: None)  # its kernels compute nothing
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    with watched() as graphs, torch.no_grad():
        torch.compile(two, options=config)(X)
    (theirs,) = graphs
    ours = look_inside(two, X, config=config)
    memory = buffers_of(ours)
    assert memory == read_buffers(theirs.code, theirs.sizes)
    assert (len(memory.buffers), memory.allocations, memory.peak) == (8, allocations, peak)
    assert ours.estimate == theirs.estimate


def test_a_node_by_eager_breaks_the_fusion():
    block = FeedForward(DIM, HIDDEN)
    assert look_inside(block, X).kernels.kinds == {"cpp": 1, "extern": 3}
    assert look_inside(block, X, eager=["exp"]).kernels.kinds == {"cpp": 2, "extern": 4}
    assert look_inside(block, X, eager=["exp", "neg"]).kernels.kinds == {"cpp": 1, "extern": 5}


def test_bad_input_word_for_word():
    assert raised(torch.relu, X, eager=["rellu"]) == (
        "look_inside: eager: the graph has no operator node 'rellu'; did you mean 'relu'?")
    assert raised(torch.relu, X, config={"memory_plan": True}) == (
        "look_inside: Inductor has no option 'memory_plan': did you mean 'memory_planning'?")
    assert raised(lambda x: x.add_(1), X) == (
        "look_inside: the function changes an input or a buffer: give one that returns new tensors")


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


def test_watching_ends_with_its_block():
    with watched() as graphs:
        torch.compile(lambda x, w: x @ w)(X, SQUARE)
    torch.compile(lambda x, w: x @ w @ w)(X, SQUARE)
    assert [len(g.steps) for g in graphs] == [1]


def test_the_page_shows_what_its_example_prints(capsys, tmp_path):
    page = (Path(__file__).parents[2] / "docs/lab/inside_inductor.md").read_text()
    (code,), (output,) = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
                          for kind in ("python", "text"))
    script = tmp_path / "example.py"  # source lines come from a file
    script.write_text(code)
    runpy.run_path(str(script))
    assert capsys.readouterr().out == output
