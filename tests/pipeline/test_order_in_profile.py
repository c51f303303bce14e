"""A run's GPU against the order that a pass chose: kernels are written by hand."""

from __future__ import annotations

import pytest
from on_ranks import small

from workbench.graph.read.simulated_run import simulated
from workbench.pipeline import run as running
from workbench.pipeline.build import build
from workbench.pipeline.measured_run import _KINDS, Kernel, run_of_kernels

PASSES = ("overlap_collectives",)


@pytest.fixture(scope="module")
def made(fake4):
    return build(small({"dp_shard": 4}, passes=PASSES), fake4)


def kernels_of(graphs, covered):
    """One collective after the other, 10 µs each; a product runs beside each of the first `covered`, or after it."""
    found = []
    for i, span in enumerate(simulated(graphs).collectives):
        begin, work = 20.0 * i, 20.0 * i + (0 if i < covered else 10)
        kind = _KINDS[span.label.split(" ", 1)[0]]
        found += [Kernel(f"ncclDevKernel_{kind}_RING_LL(x)", 20, begin, begin + 10), Kernel("gemm", 7, work, work + 10)]
    return found


@pytest.mark.parametrize(("covered", "outcome", "effect"), [
    (10_000, "PASS", "PASS"), (0, "FAIL", "NO_EFFECT"), (None, "UNKNOWN", "PASS")])
def test_a_pass_whose_order_the_gpu_did_not_run_loses_its_pass(made, monkeypatch, covered, outcome, effect):
    """Covered: all collectives, or none; or the profile has no kernel."""
    graphs = made.step.split.by_part
    kernels = [] if covered is None else kernels_of(graphs, covered)
    monkeypatch.setattr(running, "measured", lambda step, what: run_of_kernels(kernels, graphs, "measured on paper"))
    monkeypatch.setattr(running, "gathered", lambda own: [own])
    monkeypatch.setattr(made.known, "profile", None)
    running._profile_order(made, lambda: None)
    found = made.pipeline[-1]
    assert found.outcome == outcome, found
    assert found.evidence["hidden"] == 12 and found.evidence["seen"] == (0 if covered is None else 12)
    told = made.records[-1].verdict("effect")
    assert told.outcome == effect
    if covered == 0:
        assert told.message == f"the GPU did not run the order that it chose: {found.message}"
        assert "first exposed one is forward" in found.message


def test_without_a_chosen_order_nothing_is_profiled(fake4, monkeypatch):
    monkeypatch.setattr(running, "measured", lambda *_: pytest.fail("profiled"))
    plain = build(small({"dp_shard": 4}), fake4)
    running._profile_order(plain, lambda: None)
    assert plain.known.profile is None and plain.pipeline == []
