"""The estimate of what a compiler fuses, against the kernels that Inductor writes for the same graphs."""

import pytest
from torch._inductor import config

from workbench import build, fake_world, load_recipe
from workbench.graph.read import fused_cost
from workbench.graph.read.fused_cost import fused_ms, kernels_ms
from workbench.graph.read.kernels import find_kernels
from workbench.graph.read.nodes import is_compute

pytestmark = pytest.mark.nightly  # a compilation
MOVED, ALL = 0.15, 0.02
"""How far the estimate may be from Inductor's kernels: of the time of kernels that only move bytes, and of all time."""


@pytest.fixture(scope="module")
def lowered():
    """(graph, Inductor's kernels) of forward and backward; sizes at which bytes count, not launches.

    Inductor's C++ also puts copies that have nothing to do with each other into one kernel, so kernels are not counted.
    """
    recipe = load_recipe("llama3_full_inductor").override({
        "mesh.dp_shard": 4, "mesh.tp": 1, "model.flavor": "1b", "model.n_layers": 2, "data.seq_len": 512,
        "strict": False, "passes": ["transformer_block_bucketing", "full_inductor_compilation"]})
    with fake_world(4) as world, config.patch(force_disable_caches=True):
        last = build(recipe, world).records[-1]
        yield [(graph, find_kernels(function, graph)) for graph, function in zip(last.before, last.after, strict=True)]


def errors(lowered, device):
    """Relative errors (of moving kernels, of all) of the forward and of the backward."""
    found = []
    for graph, kernels in lowered:
        times, true = fused_ms(graph, device), sum(kernels_ms(kernels, graph, device))
        products = sum(ms for node, ms in times.items() if is_compute(node))
        off = sum(times.values()) - true
        found.append((off / (true - products), off / true))
    return found


def fits(found):
    return all(abs(moved) < MOVED and abs(every) < ALL for moved, every in found)


def test_estimated_fusion_takes_as_long_as_inductors_kernels(lowered):
    for device in ("h100", "h200x1"):
        found = errors(lowered, device)
        assert fits(found), (device, found)


@pytest.mark.parametrize("kind", ["pointwise", "reduction"])
def test_an_estimate_that_leaves_one_kind_of_operator_alone_does_not_fit(lowered, monkeypatch, kind):
    monkeypatch.setattr(fused_cost, "_FUSES", fused_cost._FUSES - {kind})
    found = errors(lowered, "h200x1")
    assert not fits(found), found
