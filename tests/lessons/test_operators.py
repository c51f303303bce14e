"""Pictures of a few operators: their traffic as one kernel or several, and where rounding differs."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError
from workbench.graph.read.fused_cost import kernel_traffic
from workbench_lessons.l04_decompose.pictures import rounding, traffic
from workbench_lessons.l16_fewer_bits_proved.pictures import ZERO, float8_grid

BYTES = 4 * 64  # of one tensor


@pytest.fixture(scope="module")
def graph():
    """exp and add of an input, with a view between, and the sum of an expanded vector."""
    def function(x, y):
        return (x.exp().view(8, 8) + y.view(8, 8), y.view(8, 8)[0].expand(8, 8) + 1)

    return make_fx(function, tracing_mode="fake")(torch.ones(64), torch.ones(64))


def test_one_kernel_keeps_what_is_between_its_operators_out_of_memory(graph):
    apart = kernel_traffic(graph, [["exp"], ["add"]])
    (fused,) = kernel_traffic(graph, [["exp", "add"]])
    assert [kernel.bytes for kernel in apart] == [2 * BYTES, 3 * BYTES] and fused.bytes == 3 * BYTES
    assert fused.reads == {"x_1": BYTES, "y_1": BYTES} and fused.writes == {"add": BYTES}
    assert fused.readers["y_1"].name == "add"


def test_an_expanded_row_is_read_once(graph):
    (kernel,) = kernel_traffic(graph, [["add_1"]])
    assert kernel.reads == {"y_1": BYTES // 8} and kernel.writes == {"add_1": BYTES}
    with pytest.raises(WorkbenchError, match="the graph has no node 'nothing'"):
        kernel_traffic(graph, [["nothing"]])


def test_the_picture_states_the_bytes_of_each_kernel(graph):
    text = traffic({"two": (graph, [["exp"], ["add"]]), "one": (graph, [["exp", "add"]])}).text
    assert "two: 2 kernels, reads 768 + writes 512 = 1,280 B" in text
    assert "one: 1 kernel, reads 512 + writes 256 = 768 B" in text
    with pytest.raises(WorkbenchError, match="at most 16 operators"):
        traffic({"many": (graph, [["exp"]] * 17)})


def test_rounding_says_which_results_have_the_same_bits():
    x = torch.linspace(-2, 2, 50)
    text = rounding(x, x.exp(), {"again": x.exp(), "squared": (x / 2).exp() ** 2}).text
    assert "again: the same bits" in text and "squared: other bits" in text


def test_the_grid_counts_what_becomes_0():
    x = torch.tensor([ZERO, -ZERO, ZERO * 1.01, -1.0, 448.0, 0.0])
    found = float8_grid({"as it is": x, "scaled": x * 0.5})
    assert found.text.splitlines() == ["as it is: 2 of 5 become 0", "scaled: 3 of 5 become 0"]
    assert found.png.startswith(b"\x89PNG") and "2 of 5 become 0; scaled" in found.alt
