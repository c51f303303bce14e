"""A run kept node by node, and which nodes of two runs are the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from graphs_by_hand import group_name, named
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.checks.record import PassRecord
from workbench.lab.bisect import Bisection, search
from workbench.lab.bisect.nodes import Matching, trace
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


def resharded():
    """What a rank keeps of DTensor's all-to-all: its two of four columns, of the rows of both ranks."""
    rank = dist.get_rank()
    mine = torch.arange(8.0).reshape(2, 4)[rank:rank + 1]
    gm = make_fx(lambda x: [torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group_name())])(mine)
    return [v.tensors[0].tolist() for key, v in run(gm, mine).values.items() if "alltoall" in key[1]]


def test_a_collective_that_blocks_has_its_value_at_once(pool2):
    assert pool2.run(resharded) == [[[[0.0, 1.0], [4.0, 5.0]]], [[[2.0, 3.0], [6.0, 7.0]]]]


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


def test_a_graph_that_raises_is_found_at_its_node_and_a_compiled_one_is_named_alone(monkeypatch):
    gm = make_fx(lambda primals, tangents: [primals[0] @ primals[1]])([X, Y.t()], [])
    after = clone(gm)
    named(after, "aten.mm")[0].args = tuple(after.graph.find_nodes(op="placeholder"))[::-1]
    monkeypatch.setattr(search, "_light_problem", lambda record, expected: "")  # lint finds it, too
    inputs = search.Inputs([X, torch.ones(3, 3)], [], 1)
    raises = search.first_wrong([record(gm, after)], inputs)[0]
    assert "; its graph raises RuntimeError: " in raises.problem and raises.after.name == "mm"
    assert "mat1 and mat2 shapes cannot be multiplied" in raises.difference
    compiled = search.first_wrong([record(gm, lambda primals, tangents: [primals[0] @ primals[1] + 1])], inputs)[0]
    text = repr(Bisection("r", "1 gloo ranks", ("mine",), compiled, {"other": "done while tracing"}, ("lint",)))
    assert text.splitlines() == ["bisect: r on 1 gloo ranks; passes mine",
                                 f"first pass: 'mine', 1 of 1: {compiled.problem}",
                                 "covered: lint", "not checked: pass 'other': done while tracing"]
