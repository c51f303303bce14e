"""The sort that keeps Inductor's kernels in the order of the graph; the scheduler's nodes are stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._inductor.virtualized import V
from torch.fx import Graph

from workbench.errors import WorkbenchError
from workbench.torch_api.inductor.kept_order import KeptOrder, graph_order

GRAPH = Graph()
NODES = [GRAPH.placeholder(name) for name in "abcd"]


def scheduled(name, *needs, of=()):
    """A node of Inductor's scheduler that writes buffer `name`, reads `needs`, and was made from nodes of GRAPH."""
    part = SimpleNamespace(node=SimpleNamespace(get_origins=lambda: [NODES[i] for i in of]))
    return SimpleNamespace(name=name, get_nodes=lambda: [part], get_buffer_names=lambda: [name],
                           unmet_dependencies=[SimpleNamespace(name=need) for need in needs])


def order(*nodes):
    with V.set_graph_handler(SimpleNamespace(graph=GRAPH)):
        return [node.name for node in KeptOrder()(list(nodes))]


def test_kernels_come_in_the_order_of_the_last_node_that_they_compute():
    nodes = [scheduled("late", of=(0, 3)), scheduled("first", of=(1,)), scheduled("second", of=(2,))]
    assert order(*nodes) == ["first", "second", "late"]


def test_what_a_kernel_reads_comes_first_and_a_result_of_no_node_comes_last():
    nodes = [scheduled("early", "late", of=(0,)), scheduled("late", of=(3,)), scheduled("freed", "late"),
             scheduled("input", "a buffer of another graph", of=(2,))]
    assert order(*nodes) == ["input", "late", "early", "freed"]


def test_kernels_in_a_circle_are_refused():
    with pytest.raises(WorkbenchError, match="kernels wait for each other: set keep_order = false"):
        order(scheduled("x", "y", of=(0,)), scheduled("y", "x", of=(1,)), scheduled("z", of=(2,)))


def test_its_options_can_be_cached():
    options = graph_order()
    assert options["reorder_for_peak_memory"] is False
    assert options["_post_fusion_custom_pass"].uuid() == KeptOrder().uuid()
