"""A profile becomes a timeline: streams are matched with process groups by the order of their collectives."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch
from graphs_by_hand import C10D
from torch.fx.experimental.proxy_tensor import make_fx

from workbench import WorkbenchError, author, capture, fake_world, load_recipe, partition, run_joint, run_partitioned
from workbench.checks.order import times_of
from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.simulated_run import COMPUTE, CPU_LATE, HIDDEN, simulated
from workbench.pipeline.measured_run import _KINDS, Kernel, run_of_kernels

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.timelines import predictions
from benchmarks.variants import recipe_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results"

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


def spread(kernels):
    """As a replayed CUDA graph runs them: each collective on the stream of a branch of its own."""
    return [k if k.stream == 7 else k._replace(stream=200 + i) for i, k in enumerate(kernels)]


@pytest.mark.nightly  # captures 16 layers
def test_the_order_chosen_for_two_gpus_is_the_order_that_they_ran():
    """By a committed trace of 2 H200: forward and backward, lowered by Inductor and replayed."""
    variant = "llama3_full_inductor_block_bucketing_overlap_cudagraph"
    recipe = recipe_of(variant, "llama3", {"mesh.tp": 1})
    with fake_world(2) as world:
        joint = capture(author(recipe, world))
        run_joint(joint, recipe.joint_passes)
        pair = partition(joint)
        run_partitioned(pair, recipe.passes[:2])
    chosen = pair.facts.order
    kernels = [replayed(RESULTS / f"traces_h200x2/{variant}.rank{rank}.json.gz") for rank in (0, 1)]
    runs = [run_of_kernels(own, pair.by_part, "2 H200") for own in kernels]
    assert len(chosen.hidden) >= 34
    for run in runs:
        verdict = chosen.in_profile(run, list(map(times_of, runs)))
        assert verdict.outcome == "PASS" and verdict.evidence["seen"] == len(chosen.hidden), verdict
    nccl = [k for k in kernels[0] if "nccl" in k.name]
    late = [k for k in kernels[0] if k in nccl or k.begin > nccl[5].begin]  # nothing computes beside the first ones
    lost = chosen.in_profile(run_of_kernels(late, pair.by_part, "2 H200"))
    assert lost.outcome == "FAIL" and lost.evidence["first"].startswith("forward all_gather")


def replayed(path):
    """The kernels of a trace's last step, up to the optimizer's all-reduce."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    begin = max(e["ts"] for e in events if e["name"].startswith("ProfilerStep#") and e.get("cat") == "user_annotation")
    kernels = sorted((Kernel(e["name"], e["args"]["stream"], e["ts"], e["ts"] + e["dur"]) for e in events
                      if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and e["ts"] >= begin),
                     key=lambda k: k.begin)
    return kernels[:next(i for i, k in enumerate(kernels) if "AllReduce" in k.name)]


def test_a_replays_streams_are_told_apart_by_kind(graphs):
    with fake_world(2) as world:
        alone = partition(capture(author(RECIPE.override({"mesh.tp": 1}), world)))
    run = run_of_kernels(spread(profile_like(alone.by_part)), alone.by_part, "measured on paper")
    assert [s.name for s in run.collectives] == [s.name for s in simulated(alone.by_part).collectives]
    lost = spread(profile_like(alone.by_part))
    lost.remove(next(k for k in lost if "AllGather" in k.name))  # they are one too few
    assert told(lost, alone.by_part) == {"reduce_scatter"}
    # both groups of `graphs` gather, and their kernels may have overtaken each other
    assert "all_gather" not in told(spread(profile_like(graphs)), graphs)


def told(kernels, graphs):
    """The kinds of the collectives that were told apart."""
    return {s.label.split(" ")[0] for s in run_of_kernels(kernels, graphs, "on paper").collectives if s.part}


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


@pytest.mark.parametrize(("launched", "limit"), [(1.9, "nothing computes meanwhile"), (2.1, CPU_LATE)])
def test_compute_that_could_not_begin_in_the_first_half_of_a_collective_was_launched_too_late(graphs, launched, limit):
    """One that waits in the stream since before lost its place to the collective's wait."""
    kernels = [Kernel("gemm", 7, 0.0, 1.0, -1.0), Kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, 2.0, 8.0),
               Kernel("gemm", 7, 9.0, 10.0, launched)]
    (found,) = run_of_kernels(kernels, graphs, "measured on paper").collectives
    assert (found.limit, found.exposed) == (limit, 0.006)
