"""A run's GPU against the order that a pass chose: kernels are written by hand."""

from __future__ import annotations

import pytest
import torch
from on_ranks import small

from workbench.graph.read.simulated_run import simulated
from workbench.pipeline.build import build
from workbench.pipeline.measured_run import _KINDS, Kernel
from workbench.pipeline.run import note_kernels

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


def note(built, monkeypatch, kernels):
    """Note the kernels of a step, as on a GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "paper")
    monkeypatch.setattr(built.known, "profile", None)
    monkeypatch.setattr(built.known, "ran", None)
    note_kernels(built, kernels)


@pytest.mark.parametrize(("covered", "outcome", "effect"), [
    (10_000, "PASS", "PASS"), (0, "FAIL", "NO_EFFECT"), (None, "UNKNOWN", "PASS")])
def test_a_pass_whose_order_the_gpu_did_not_run_loses_its_pass(made, monkeypatch, covered, outcome, effect):
    """Covered: all collectives, or none; or the profile has no kernel."""
    graphs = made.step.split.by_part
    kernels = [] if covered is None else kernels_of(graphs, covered)
    note(made, monkeypatch, kernels)
    found = made.pipeline[-1]
    assert found.outcome == outcome, found
    assert found.evidence["hidden"] == 12 and found.evidence["seen"] == (0 if covered is None else 12)
    told = made.records[-1].verdict("effect")
    assert told.outcome == effect
    if covered == 0:
        assert told.message == f"the GPU did not run the order that it chose: {found.message}"
        assert "first exposed one is forward" in found.message


def test_without_a_chosen_order_nothing_is_compared_with_it(fake4, monkeypatch):
    plain = build(small({"dp_shard": 4}), fake4)
    note(plain, monkeypatch, [Kernel("gemm", 7, 0.0, 10.0)])
    assert plain.known.profile is None and plain.pipeline == [] and plain.known.ran == {"gemm": 1}
