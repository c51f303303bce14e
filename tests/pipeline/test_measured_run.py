"""A profile becomes a timeline: streams are matched with process groups by the order of their collectives."""

import sys
from pathlib import Path

import pytest
import torch

from workbench import WorkbenchError, author, build, capture, partition
from workbench.graph.read.simulated_run import COMPUTE, CPU_LATE, simulated
from workbench.pipeline.measured_run import _KINDS, Kernel, run_of_kernels

sys.path.insert(0, str(Path(__file__).parents[2]))
from on_ranks import FSDP_TP, small

from benchmarks.timelines import predictions
from workbench.pipeline.run import note_kernels


@pytest.fixture(scope="module")
def graphs(fake4):
    return partition(capture(author(small(FSDP_TP), fake4))).by_part


@pytest.fixture(scope="module")
def made(fake4):
    return build(small({"dp_shard": 4}, passes=("overlap_collectives",)), fake4)


def profile_like(graphs, scale=2.0):
    """Kernels as a GPU would run the simulated step `scale` times slower; group i on stream 20 + i."""
    kernels, streams = [], {}
    for span in simulated(graphs).spans:
        begin, end = span.begin * 1e3 * scale, span.end * 1e3 * scale
        if span.lane == COMPUTE:
            kernels.append(Kernel("gemm", 7, begin, end))
        else:
            kind = _KINDS[span.label.split(" ", 1)[0]]
            stream = streams.setdefault(span.lane, 20 + len(streams))
            kernels.append(Kernel(f"ncclDevKernel_{kind}_RING_LL(ncclDevKernelArgs)", stream, begin, end))
    return kernels


def test_collectives_are_matched_in_their_order(graphs):
    run, wanted = run_of_kernels(profile_like(graphs), graphs, "measured on paper"), simulated(graphs)
    assert run.total_ms == pytest.approx(2 * wanted.total_ms, rel=0.01)
    assert run.compute_ms == pytest.approx(2 * wanted.compute_ms, rel=0.01)
    assert set(run.lanes) == {COMPUTE, "dp_shard", "tp"}
    found = predictions(run, graphs, "h100")
    assert len(found) == len(wanted.collectives)
    assert all(p.error == pytest.approx(-0.5) for p in found)  # it took twice as long


def test_a_profile_of_something_else_is_refused(graphs):
    kernels = [k for k in profile_like(graphs) if k.stream == 7]
    with pytest.raises(WorkbenchError, match="no collective of the profile fits the graphs: profile one forward"):
        predictions(run_of_kernels(kernels, graphs, "measured on paper"), graphs)
    lost = profile_like(graphs)
    lost.remove(next(k for k in lost if k.stream == 20))  # one launch is missing: that stream fits no group
    lanes = run_of_kernels(lost, graphs, "measured on paper").lanes
    assert "stream 20" in lanes and "tp" in lanes and "dp_shard" not in lanes


def spread(kernels):
    """As a replayed CUDA graph runs them: each collective on the stream of a branch of its own."""
    return [k if k.stream == 7 else k._replace(stream=200 + i) for i, k in enumerate(kernels)]


def test_a_replays_streams_are_told_apart_by_kind(graphs, made):
    alone = made.step.split.by_part
    run = run_of_kernels(spread(profile_like(alone)), alone, "measured on paper")
    assert [s.name for s in run.collectives] == [s.name for s in simulated(alone).collectives]
    lost = spread(profile_like(alone))
    lost.remove(next(k for k in lost if "AllGather" in k.name))  # they are one too few
    assert told(lost, alone) == {"reduce_scatter"}
    # both groups of `graphs` gather, and their kernels may have overtaken each other
    assert "all_gather" not in told(spread(profile_like(graphs)), graphs)


def told(kernels, graphs):
    """The kinds of the collectives that were told apart."""
    return {s.label.split(" ")[0] for s in run_of_kernels(kernels, graphs, "on paper").collectives if s.part}


@pytest.mark.parametrize(("launched", "limit"), [(1.9, "nothing computes meanwhile"), (2.1, CPU_LATE)])
def test_compute_that_could_not_begin_in_the_first_half_of_a_collective_was_launched_too_late(graphs, launched, limit):
    """One that waits in the stream since before lost its place to the collective's wait."""
    kernels = [Kernel("gemm", 7, 0.0, 1.0, -1.0), Kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, 2.0, 8.0),
               Kernel("gemm", 7, 9.0, 10.0, launched)]
    (found,) = run_of_kernels(kernels, graphs, "measured on paper").collectives
    assert (found.limit, found.exposed) == (limit, 0.006)


# A run's GPU against the order that a pass chose: kernels are written by hand.

def kernels_of(graphs, covered):
    """One collective after the other, 10 µs each; a product runs beside each of the first `covered`, or after it."""
    found = []
    for i, span in enumerate(simulated(graphs).collectives):
        begin, work = 20.0 * i, 20.0 * i + (0 if i < covered else 10)
        kind = _KINDS[span.label.split(" ", 1)[0]]
        found += [Kernel(f"ncclDevKernel_{kind}_RING_LL(x)", 20, begin, begin + 10), Kernel("gemm", 7, work, work + 10)]
    return found


def note(built, monkeypatch, kernels):
    """Note the kernels of a step, as on a GPU, until the test ends."""
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
