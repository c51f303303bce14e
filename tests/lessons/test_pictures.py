"""What the pictures of the lessons refuse, in words. What they show is compared with the outputs of the notebooks."""

from __future__ import annotations

import pytest
import torch
from notebook.draw.test_kernels import Made, record
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError
from workbench_lessons.l03_split_forward_and_backward.pictures import unbeaten
from workbench_lessons.l04_decompose.pictures import census, kernel_traffic, traffic
from workbench_lessons.l08_replay_with_cudagraphs.pictures import addresses
from workbench_lessons.l09_route_tokens_to_experts.pictures import routing
from workbench_lessons.l14_read_your_own_trace.pictures import dots, kernels_over_time
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import operators_in_order

KINDS = {"R": "reads", "M": "another", "U": "an update"}
SCORES = torch.rand(3, 4)
BYTES = 4 * 64  # of one tensor


@pytest.fixture(scope="module")
def graph():
    """exp and add of an input, with a view between, and the sum of an expanded vector."""
    def function(x, y):
        return (x.exp().view(8, 8) + y.view(8, 8), y.view(8, 8)[0].expand(8, 8) + 1)

    return make_fx(function, tracing_mode="fake")(torch.ones(64), torch.ones(64))


@pytest.mark.parametrize(("draw", "given", "says"), [
    (routing, (SCORES, SCORES.topk(1).indices, 3), r"4 experts do not divide by ranks \(1\) and groups \(3\)"),
    (addresses, (record(print, name="regional_inductor"),), "pass 'regional_inductor' records no CUDA graph"),
    (addresses, (record(*[Made(0xABC)] * 31),), "62 inputs are too many"),
    (kernels_over_time, ({"x": []},), "give one"), (kernels_over_time, ({},), "give one"),
    (dots, ({},), "give one"), (dots, ({"x": ([], [1])},), "give one"),
    (operators_in_order, ({}, KINDS), "give one row or more"),
    (operators_in_order, ({"a": "R"}, {**KINDS, "X": "one more"}), "give one row or more"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_drawn_is_refused(draw, given, says):
    with pytest.raises(WorkbenchError, match=says):
        draw(*given)


def test_traffic_needs_nodes_of_the_graph_and_few_of_them(graph):
    with pytest.raises(WorkbenchError, match="the graph has no node 'nothing'"):
        kernel_traffic(graph, [["nothing"]])
    with pytest.raises(WorkbenchError, match="at most 16 operators"):
        traffic({"many": (graph, [["exp"]] * 17)})


def test_operators_are_counted_by_name_and_by_kind(graph):
    assert census(graph).ops == {"aten.view": 3, "aten.add": 2, "aten.exp": 1, "aten.select": 1, "aten.expand": 1}
    assert census(graph).kinds == {"view": 5, "pointwise": 3}


def test_one_kernel_keeps_what_is_between_its_operators_out_of_memory(graph):
    apart = kernel_traffic(graph, [["exp"], ["add"]])
    (fused,), (row,) = kernel_traffic(graph, [["exp", "add"]]), kernel_traffic(graph, [["add_1"]])
    assert [kernel.bytes for kernel in apart] == [2 * BYTES, 3 * BYTES] and fused.bytes == 3 * BYTES
    assert fused.reads == {"x_1": BYTES, "y_1": BYTES} and fused.writes == {"add": BYTES}
    assert fused.readers["y_1"].name == "add"
    assert row.reads == {"y_1": BYTES // 8} and row.writes == {"add_1": BYTES}  # an expanded row is read once


def test_equal_points_do_not_beat_each_other():
    points = {"all": (8, 0), "some": (4, 0), "few": (4, 3), "none": (0, 6), "worse": (8, 6), "one": (2, 3)}
    assert unbeaten(points) == ["none", "one", "some"] and unbeaten({"a": (1, 1), "b": (1, 1)}) == ["a", "b"]
