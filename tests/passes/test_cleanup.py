"""graph_cleanup: what is idle goes, what only looks idle stays."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from workbench.passes.graph_cleanup import fewer_nodes, graph_cleanup
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.torch_api.ops import op_name

pytestmark = pytest.mark.integration

aten = torch.ops.aten


def graph_of(*steps, shape=(2, 3, 4)):
    """x through each (operator, *arguments) in turn, and + 1 at the end; each node with its fake value."""
    graph = Graph()
    with new_fake_mode():
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(shape)
        for target, *args in (*steps, (aten.add.Tensor, 1)):
            made = graph.call_function(target, (node, *args))
            made.meta["val"] = target(node.meta["val"], *args)
            node = made
    graph.output((node,))
    return GraphModule(torch.nn.Module(), graph)


def left(*steps, **keywords):
    gm = graph_of(*steps, **keywords)
    x = torch.randn(gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape)
    before = gm(x)[0]
    graph_cleanup(gm, [], options=None)
    gm.recompile()
    after = gm(x)[0]
    assert torch.equal(before, after) and before.stride() == after.stride()
    return [op_name(n.target) for n in gm.graph.nodes if n.op == "call_function"][:-1]


VIEW, TURN, PERMUTE = aten.view.default, aten.transpose.int, aten.permute.default
LEFT = [
    ([(VIEW, [6, 4]), (VIEW, [2, 3, 4])], []),
    ([(PERMUTE, [2, 0, 1]), (PERMUTE, [1, 2, 0])], []),
    ([(aten.detach.default,), (aten.alias.default,)], []),
    ([(TURN, 0, 2), (VIEW, [4, 3, 2]), (TURN, 0, 2)], []),
    ([(VIEW, [6, 4]), (VIEW, [24])], ["aten.view"]),  # one view is enough
    ([(PERMUTE, [2, 0, 1]), (PERMUTE, [2, 0, 1])], ["aten.permute"] * 2),
    ([(aten.clone.default,), (aten.detach.default,)], ["aten.clone"]),
    # torch 2.15's buckets hold views as another dtype, which keep the shape of their input
    ([(VIEW, [6, 4]), (aten.view.dtype, torch.int32)], ["aten.view"] * 2),
    ([(aten.view.dtype, torch.int32), (VIEW, [24])], ["aten.view"] * 2),
]


@pytest.mark.parametrize(("steps", "kept"), LEFT, ids=str)
def test_idle_nodes_go_and_what_changes_something_stays(steps, kept):
    assert left(*steps) == kept


def test_a_transposed_square_has_other_strides_and_stays():
    assert left((TURN, 0, 1), shape=(3, 3)) == ["aten.transpose"]


def test_what_the_graph_returns_and_what_it_writes_stay():
    graph = Graph()
    with new_fake_mode():
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(4)
        same = graph.call_function(VIEW, (x, [4]))
        same.meta["val"] = x.meta["val"].view(4)
        written = graph.call_function(aten.add_.Tensor, (same, 1))
        written.meta["val"] = same.meta["val"]
        out = graph.call_function(aten.detach.default, (x,))
        out.meta["val"] = x.meta["val"].detach()
    graph.output((out,))
    gm = graph_cleanup(GraphModule(torch.nn.Module(), graph), [], options=None)
    assert [op_name(n.target) for n in gm.graph.nodes if n.op == "call_function"] == ["aten.add_", "aten.detach"]
    assert fewer_nodes((gm,), (gm,), None).reason == "no view and no transpose is idle"
