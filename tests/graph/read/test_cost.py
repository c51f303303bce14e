import pytest
import torch
from graphs_by_hand import named, two_layer_graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.cost import DEVICES, collective_ms, flops, node_flops, node_ms


def test_attention_counts_query_heads_forward_and_backward():
    def attend(q, k, v):
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            torch.ones_like(out[0]), q, k, v, out[0], out[1], 0.0, True)
        return grad[0]

    gm = make_fx(attend)(torch.ones(2, 8, 64, 16), *(torch.ones(2, 8, 64, 16) for _ in range(2)))
    forward = 2 * 2 * 2 * 8 * 64 * 64 * 16
    for kv_heads in (8, 2):  # the CPU kernel wants equal heads, the shapes alone decide
        for node in gm.graph.find_nodes(op="placeholder")[1:]:
            node.meta["val"] = torch.ones(2, kv_heads, 64, 16)
        assert sorted(filter(None, map(node_flops, gm.graph.nodes))) == [forward, forward * 5 // 2]


def test_a_node_takes_the_longer_of_compute_and_memory(fake4):
    big = make_fx(lambda a, b: torch.relu(a @ b))(torch.ones(512, 512), torch.ones(512, 512))
    mm, relu = named(big, "aten.mm")[0], named(big, "relu")[0]
    spec = DEVICES["cpu"]
    assert node_ms(mm, spec) == pytest.approx(1e3 * 2 * 512**3 / (0.75 * 0.1e12))
    assert node_ms(relu, spec) == pytest.approx(1e3 * 2 * 512 * 512 * 4 / 10e9)
    assert node_ms(mm, "h100") < node_ms(mm, spec) / 50


def test_matmuls_count_two_flop_a_product_and_collectives_follow_the_ring_and_its_slowest_link(fake4):
    gm = two_layer_graph()
    assert flops(gm) == {"aten.mm": 2 * (2 * 3 * 8 * 8)}
    one = list_collectives(gm)[0]
    assert collective_ms(one, DEVICES["h100"]) == pytest.approx(0.010 + 256 * 3 / 4 / 450e9 * 1e3)


def test_a_grouped_product_counts_each_row_once():
    rows, weights = torch.empty(32, 16, dtype=torch.bfloat16), torch.empty(4, 16, 24, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)

    def both(a, b, grads, offs):
        return F.grouped_mm(a, b, offs=offs), F.grouped_mm(a.T, grads, offs=offs)

    traced = make_fx(both, tracing_mode="fake")(rows, weights, torch.empty(32, 24, dtype=torch.bfloat16), ends)
    assert flops(traced) == {"aten._grouped_mm": 2 * (2 * 32 * 16 * 24)}


def test_attention_of_a_tensor_on_itself_counts_it_three_times():
    x, other = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)
    alone = make_fx(lambda x: F.scaled_dot_product_attention(x, x, x), tracing_mode="fake")(x)
    apart = make_fx(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), tracing_mode="fake")(x, other, other + 1)
    assert sum(flops(alone).values()) == sum(flops(apart).values()) == 2 * 2 * (2 * 4 * 16 * 16 * 8)
