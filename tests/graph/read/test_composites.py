"""Attention and RMS norm in parts cost on a GPU what its one kernel costs, and on a CPU what the parts cost."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench import author, capture, fake_world, load_recipe, partition
from workbench.graph.read.composites import ATTENTION, NORM, attention_ms, composites
from workbench.graph.read.cost import device_spec, node_ms
from workbench.graph.read.fused_cost import fused_ms, separate_ms
from workbench.graph.read.nodes import kind_of
from workbench.passes.inductor_decomposition import DecompositionOptions, inductor_decomposition

pytestmark = pytest.mark.integration
GPU, CPU = device_spec("h100"), device_spec("cpu")
SIZES = {"mesh.dp_shard": 1, "mesh.tp": 1, "model.n_layers": 1, "model.dim": 512, "model.ffn_dim": 1024,
         "data.seq_len": 1024, "precision.param": "bfloat16"}


@pytest.fixture(scope="module")
def pairs():
    """A llama3 whose attention is one operator, the same in parts, and the joint graph of the latter."""
    recipe = load_recipe("llama3_fsdp").override(SIZES)
    with fake_world(1) as world:
        whole = partition(capture(author(recipe, world)))
        with sdpa_kernel(SDPBackend.MATH):
            in_parts = capture(author(recipe, world))
        yield whole, partition(in_parts.fork()), in_parts


def attention(gm, spec, cost):
    costs = cost(gm, spec)
    inside = {n for call in composites(gm, spec) if call.operator == ATTENTION for n in call.nodes}
    return sum(ms for n, ms in costs.items() if n in inside or kind_of(n) == "attention")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_attention_in_parts_costs_what_one_kernel_does(pairs, part):
    whole, parts = (pair.by_part[part] for pair in pairs[:2])
    assert not any(call.operator == ATTENTION for call in composites(whole, GPU))
    (call,) = (call for call in composites(parts, GPU) if call.operator == ATTENTION)
    assert call.backward == (part == "backward")
    for cost in (separate_ms, fused_ms):
        assert attention(parts, GPU, cost) == pytest.approx(attention(whole, GPU, cost), rel=0.01) != 0
    bare = sum(node_ms(n, GPU) for n in call.nodes)
    assert bare > 5 * sum(attention_ms(call, GPU).values())  # the matmuls of float32, and their traffic


def test_a_cpu_runs_the_parts(pairs):
    for gm in pairs[1].graphs:
        assert composites(gm, CPU) == []
        assert separate_ms(gm, CPU) == {n: node_ms(n, CPU) for n in gm.graph.nodes}


def test_a_norm_is_one_kernel_forward_and_two_backward(pairs):
    forward, backward = pairs[0].graphs
    rows = 1024 * load_recipe("llama3_fsdp").data.batch_per_rank
    side = rows * 512 * torch.bfloat16.itemsize
    for gm, sides in ((forward, 2), (backward, 5)):  # reads x, writes y; reads x and dy twice, writes dx
        norms = [call for call in composites(gm, GPU) if call.operator == NORM]
        assert len(norms) == 3
        costs = separate_ms(gm, GPU)
        for call in norms:
            assert sum(costs[n] for n in call.nodes) == pytest.approx(GPU.moving_ms(sides * side), rel=0.02)


def test_a_decomposed_norm_stays_in_parts_and_the_attention_does_not(pairs):
    gm = pairs[2].graph
    assert {call.operator for call in composites(gm, GPU)} == {ATTENTION, NORM}
    gm = inductor_decomposition(gm, [], options=DecompositionOptions())
    assert {call.operator for call in composites(gm, GPU)} == {ATTENTION}
