"""What Inductor is told of a graph before it compiles it."""

from __future__ import annotations

from torch.fx import Graph, GraphModule

from workbench.torch_api.inductor.lowering import visible_outputs


def test_a_gradient_that_is_none_is_not_a_visible_output() -> None:
    """A mesh has no gradient, and Inductor fails on None on a GPU."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((x, None, x, x))
    assert visible_outputs(GraphModule({}, graph), 3) == [0, 2]
