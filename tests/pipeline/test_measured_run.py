"""A profile becomes a timeline: streams are matched with process groups by the order of their collectives."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from graphs_by_hand import C10D
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError, author, capture, fake_world, load_recipe, partition
from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.simulated_run import COMPUTE, HIDDEN, simulated
from workbench.pipeline.measured_run import _KINDS, Kernel, measured, run_of_kernels

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.timelines import predictions

RECIPE = load_recipe("llama3").override({"mesh.tp": 2, "model.n_layers": 1})


@pytest.fixture(scope="module")
def graphs():
    with fake_world(4) as world:
        pair = partition(capture(author(RECIPE, world)))
    return {"forward": pair.forward, "backward": pair.backward}


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


def test_what_compute_covers_is_hidden():
    kernels = [Kernel("gemm", 7, 0, 100), Kernel("gemm", 7, 100, 150), Kernel("gemm", 7, 200, 210),
               Kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, 20, 90),
               Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 21, 140, 190)]
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, device="meta")
    graph.output((x,))
    run = run_of_kernels(kernels, {"forward": torch.fx.GraphModule({}, graph)}, "measured on paper")
    assert [(s.limit, round(s.exposed, 3)) for s in run.collectives] == [(HIDDEN, 0.0),
                                                                         ("nothing computes meanwhile", 0.04)]
    assert run.lanes == [COMPUTE, "stream 20", "stream 21"]  # the graph has no group that would fit
    assert run.compute_ms == pytest.approx(0.16) and run.total_ms == pytest.approx(0.21)


def test_a_profile_of_something_else_is_refused(graphs):
    kernels = [k for k in profile_like(graphs) if k.stream == 7]
    with pytest.raises(WorkbenchError, match="no collective of the profile fits the graphs: profile one forward"):
        predictions(run_of_kernels(kernels, graphs, "measured on paper"), graphs)
    lost = profile_like(graphs)
    lost.remove(next(k for k in lost if k.stream == 20))  # one launch is missing: that stream fits no group
    lanes = run_of_kernels(lost, graphs, "measured on paper").lanes
    assert "stream 20" in lanes and "tp" in lanes and "dp_shard" not in lanes


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_it_says_so(graphs):
    with pytest.raises(WorkbenchError, match="measured on a GPU, and there is none here"):
        measured(lambda: None, None)


def test_groups_whose_collectives_are_alike_are_not_guessed_apart():
    def two(x):
        starts = [C10D.all_gather_into_tensor(x.repeat(n, 1), 2, group) for n, group in ((1, "A"), (9, "B"))]
        return [C10D.wait_tensor(start) for start in starts]

    with fake_world(2):
        gm = make_fx(two, tracing_mode="fake")(torch.randn(4, 8))
    set_facts(gm, GraphFacts("forward", {"tp": "A", "dp": "B"}, {"A": 2, "B": 2}))
    kernels = [Kernel("ncclDevKernel_AllGather_RING_LL(x)", stream, at, at + 1) for stream, at in ((20, 0), (21, 5))]
    run = run_of_kernels(kernels, {"forward": gm}, "measured on paper")
    assert [(s.lane, s.label) for s in run.collectives] == [("stream 20", ""), ("stream 21", "")]
