"""A run kept node by node, and which nodes of two runs are the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from graphs_by_hand import group_name, named
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.checks.record import PassRecord
from workbench.lab.bisect import Bisection
from workbench.lab.bisect.nodes import Matching, trace
from workbench.lab.bisect.search import first_node, first_told
from workbench.passes.registry import RegisteredPass, graph_changed
from workbench.recipe.contracts import Numerics, PassContract, Stage
from workbench.torch_api.aot import clone

X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


def bitwise(a, b):
    return None


def record(before, after):
    item = RegisteredPass(PassContract("mine", Stage.JOINT, Numerics.EXACT, ""), print, graph_changed)
    return PassRecord(item, None, (before,), (after,), 0.0, 0.0)


def run(gm, *inputs):
    return trace(record(gm, gm), [gm], list(inputs) or [X, Y], [])


def test_memory_that_nothing_filled_is_not_compared_and_what_fills_it_is_found():
    def buffered(x, y):
        buffer = torch.empty(2, 3)
        buffer.copy_(x)
        return [buffer * 2, y + 1]

    before = make_fx(buffered)(X, Y)
    empty, fill, double = (named(before, name)[0] for name in ("aten.empty", "copy_", "aten.mul"))
    double.args = (empty, 2)  # it reads the buffer itself, as a bucket is read
    after = clone(before)
    named(after, "copy_")[0].args = (named(after, "aten.empty")[0], after.graph.find_nodes(op="placeholder")[1])
    was, now = run(before), run(after)
    matching = Matching(was, now, bitwise)
    assert matching.wrong_outputs() == [0]
    key = ("joint", fill.name)
    assert matching.first() == (key, key)


def test_the_run_leaves_its_inputs_alone():
    gm = make_fx(lambda x, y: [x.add_(y)])(X.clone(), Y.clone())
    first, second = run(gm), run(gm)
    assert torch.equal(first.outputs[0], second.outputs[0]) and torch.equal(X, torch.arange(6.0).reshape(2, 3))


def resharded():
    """What a rank keeps of DTensor's all-to-all: its two of four columns, of the rows of both ranks."""
    rank = dist.get_rank()
    mine = torch.arange(8.0).reshape(2, 4)[rank:rank + 1]
    gm = make_fx(lambda x: [torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group_name())])(mine)
    return [v.tensors[0].tolist() for key, v in run(gm, mine).values.items() if "alltoall" in key[1]]


def test_a_collective_that_blocks_has_its_value_at_once(pool2):
    assert pool2.run(resharded) == [[[[0.0, 1.0], [4.0, 5.0]]], [[[2.0, 3.0], [6.0, 7.0]]]]


def test_a_node_that_raises_ends_the_run():
    gm = make_fx(lambda x, y: [x @ y.t()])(X, Y)
    named(gm, "aten.mm")[0].args = tuple(gm.graph.find_nodes(op="placeholder"))
    key, why = run(gm).raised
    assert key == ("joint", "mm") and why.startswith("raises RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in why


def test_values_are_found_under_other_names_and_a_lost_value_is_not():
    before = make_fx(lambda x, y: [x.exp() + y, x.exp().sin()])(X, Y)
    after = clone(before)
    for i, node in enumerate(n for n in after.graph.nodes if n.op == "call_function"):
        node._rename(f"other_{i}")
    same = Matching(run(before), run(after), bitwise)
    assert len(same.same) == 4 and same.suspects() == [] and same.wrong_outputs() == []
    named(after, "aten.sin")[0].target = torch.ops.aten.cos.default
    wrong = Matching(run(before), run(after), bitwise)
    assert wrong.first() == (("joint", "other_3"), ("joint", "sin"))


def test_compiled_callables_have_no_nodes():
    gm = make_fx(lambda x, y: [x + y])(X, Y)
    found = first_node(record(gm, lambda args: args), run(gm), None, "rank 0: 1 of 1 outputs break 'lossy'", 1)
    assert found.after is None and found.ranks == (0,) and first_told([]) is None
    text = repr(Bisection("r", "1 gloo ranks", ("mine",), found, {"other": "done while tracing"}, ("lint",)))
    assert text.splitlines() == ["bisect: r on 1 gloo ranks; passes mine",
                                 "first pass: 'mine', 1 of 1: rank 0: 1 of 1 outputs break 'lossy'",
                                 "covered: lint", "not checked: pass 'other': done while tracing"]


def test_a_node_that_raises_without_a_word_ends_the_trace_and_is_named():
    def wordless(x):
        raise AssertionError

    gm = make_fx(lambda x: [x + 1])(X)
    add, = named(gm, "add")
    add.target = wordless
    add.args = add.args[:1]
    gm.recompile()
    assert run(gm, X).raised == (("joint", "add"), "raises AssertionError: AssertionError")
