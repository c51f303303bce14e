"""`workbench order`: traces made by hand, one cause each, and what is no trace."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from unpacked import unpacked

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.graph.read.simulated_run import BEHIND_OTHERS, HIDDEN
from workbench.notebook.draw.colors import GREY
from workbench.notebook.show import outputs
from workbench.notebook.views import TimelineView
from workbench.pipeline.gpu_communication import COMPUTE, COPY, NCCL, SYMMETRIC, kind_of, union, waited_for
from workbench.pipeline.step_profile import step_profile
from workbench.tools.timing import trace_file
from workbench.tools.timing.order import gaps, overlap, read_order
from workbench.tools.timing.trace_file import read_trace

GATHER, MM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "sm90_xmma_gemm_bf16"
LONG_AGO = -1000.0


def kernel(name, begin, end, *, stream=7, launched=LONG_AGO, call="cudaLaunchKernel", cat="kernel", device=0, **about):
    """A kernel and the CPU's call for it, which ends at `launched`; times in microseconds."""
    return [(cat, name, begin, end, {"device": device, "stream": stream, **about}),
            *([("cuda_runtime", call, launched - 5, launched, {})] if call else [])]


def trace(path, *kernels, marks=(), rank=None):
    events = []
    for number, parts in enumerate(kernels):
        events += [{"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": 1,
                    "args": {**args, "correlation": number}} for cat, name, begin, end, args in parts]
    events += [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": a, "dur": b - a}
               for i, a, b in marks]
    data = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}]}
    if rank is not None:
        data["distributedInfo"] = {"rank": rank, "world_size": 2}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def order(tmp_path):
    """The one step of a trace of these kernels."""
    return lambda *kernels: read_order([trace(tmp_path / "t.json", *kernels)]).steps[0]


def test_a_collective_behind_a_product_is_hidden(order):
    step = order(kernel(MM, 0, 100), kernel(GATHER, 10, 90, stream=20), kernel(MM, 100, 150))
    (found,) = step.collectives
    assert found.hidden and found.exposed_ms == 0 and found.behind == {MM: 0.08}
    assert (step.span_ms, step.compute_ms, step.communication_ms, step.exposed_ms, step.idle_ms, step.launches) == (
        0.15, 0.15, 0.08, 0, 0, 3)


REASONS = {
    "its reader": ([kernel(MM, 0, 50), kernel(GATHER, 80, 180, stream=20), kernel("softmax", 182, 190)],
                   "softmax waits for it"),
    "its input": ([kernel("cat", 0, 50), kernel(GATHER, 52, 180, stream=20)],
                  "it starts when cat ends, whose result it may send"),
    "both": ([kernel("cat", 0, 50), kernel(GATHER, 52, 180, stream=20), kernel(MM, 181, 190)],
             f"it starts when cat ends, whose result it may send; {MM} waits for it"),
    "its stream": ([kernel(MM, 0, 99), kernel("ncclA", 10, 100, stream=20), kernel("ncclB", 101, 300, stream=20)],
                   "its stream was busy with ncclA"),
    "the CPU": ([kernel(MM, 0, 50), kernel(GATHER, 200, 300, stream=20, launched=195)],
                "the CPU launched it late, when the GPU had nothing else to do"),
    "a replay": ([kernel(MM, 0, 50), kernel(GATHER, 200, 300, stream=20, launched=195, call="cudaGraphLaunch")],
                 "no compute was ready to run meanwhile"),
}


@pytest.mark.parametrize(("kernels", "why"), REASONS.values(), ids=REASONS)
def test_why_a_collective_is_exposed(order, kernels, why):
    last = order(*kernels).collectives[-1]
    assert last.why == why and last.exposed_ms > 0


RESULTS = Path(__file__).parents[2] / "benchmarks/results"
RECORDED = RESULTS / "traces_h200"


def timed(folder, lines):
    """The benchmark's first round of each variant that has a trace in `folder`."""
    found = map(json.loads, (RESULTS / lines).read_text(encoding="utf-8").splitlines())
    return {line["variant"]: line for line in found if line["round"] == 0 and (
        RESULTS / folder / f"{line['variant']}.rank0.json.gz").exists() and line["recipe"]["mesh"]["tp"] == 1}


REFERENCE = timed("traces_h100", "traces_h100/steps.jsonl")
TIMED, ON_TWO = timed("traces_h200", "traces_h200/steps.jsonl"), timed("traces_h200x2", "llama3_1b_h200x2.jsonl")


@pytest.mark.parametrize("variant", TIMED)
def test_traces_of_real_jobs_say_what_the_benchmark_measured_of_them(variant):
    """Eager, torch.compile and ours on one H200: the benchmark's own account of another step is close."""
    steps = read_order([RECORDED / f"{variant}.rank0.json.gz"]).steps
    assert [step.step for step in steps] == ["ProfilerStep#1", "ProfilerStep#2"]
    for step in steps:
        assert step.launches == TIMED[variant]["launches"] and step.communication_ms == 0
        assert step.compute_ms == pytest.approx(TIMED[variant]["kernels_ms"], rel=0.04)
        assert step.span_ms == pytest.approx(step.compute_ms + step.idle_ms)


@pytest.mark.parametrize(("variant", "replayed"), [("reference", False), ("reference_cudagraph", True)])
def test_traces_of_torchtitans_toolkit_on_one_gpu(variant, replayed):
    """Its small model on one H100: without a replay the GPU waits for most of the step."""
    steps = read_order([RESULTS / f"traces_h100/{variant}.rank0.json.gz"]).steps
    assert len(steps) == 2
    for step in steps:
        assert step.launches == REFERENCE[variant]["launches"] and step.communication_ms == 0
        assert step.compute_ms == pytest.approx(REFERENCE[variant]["kernels_ms"], rel=0.1)
        assert step.span_ms == pytest.approx(step.compute_ms + step.idle_ms)
    assert (steps[-1].launches < 50) is replayed and steps[-1].idle_ms > steps[-1].compute_ms


@pytest.mark.parametrize("variant", ON_TWO)
def test_traces_of_two_gpus_say_what_the_benchmark_measured_of_them(variant):
    """Eager, torch.compile, torchtitan's toolkit and ours on two H200, of both ranks."""
    steps = read_order([RESULTS / f"traces_h200x2/{variant}.rank{rank}.json.gz" for rank in (0, 1)]).steps
    assert len(steps) == 4
    for step in steps:
        assert step.launches == ON_TWO[variant]["launches"]
        if step.rank == 0:  # the benchmark's figures are rank 0's
            assert step.compute_ms == pytest.approx(ON_TWO[variant]["kernels_ms"], rel=0.05)
        assert step.span_ms == pytest.approx(step.compute_ms + step.exposed_ms + step.idle_ms)
        assert step.communication_ms > 15
        assert (step.exposed_ms < 5) is (variant not in ("eager", "compile"))  # a replay hides it, a late CPU does not


def test_six_jobs_of_two_gpus_are_committed():
    assert len(ON_TWO) == 6


def test_one_replay_leaves_the_gpu_less_idle():
    idle = {variant: read_order([RECORDED / f"{variant}.rank0.json.gz"]).steps[-1].idle_ms for variant in TIMED}
    assert idle["llama3_full_inductor_cudagraph"] < idle["llama3_full_inductor"] < min(idle["eager"], idle["compile"])


def test_communication_hides_no_communication(order):
    step = order(kernel("ncclA", 0, 100, stream=20), kernel("ncclB", 50, 150, stream=21))
    assert step.exposed_ms == step.communication_ms == 0.15 and step.compute_ms == 0
    assert [c.exposed_ms for c in step.collectives] == [0.1, 0.1] and [c.shared_ms for c in step.collectives] == [
        0.05, 0.05]


KINDS = {
    GATHER: NCCL, "ncclSymkDevKernel_AllGather_LL": NCCL,
    "Memcpy PtoP (Device -> Device)": COPY, "Memcpy DtoD (Device -> Device)": COMPUTE,
    "(anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)": SYMMETRIC,
    "void multimem_all_reduce_kernel<4>(__nv_bfloat16*)": SYMMETRIC, "one_shot_all_reduce_kernel": SYMMETRIC,
    MM: COMPUTE,
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=lambda value: value[:24])
def test_what_communicates(name, kind):
    assert kind_of(name) == kind


def test_a_copy_that_waits_hides_no_collective(order):
    step = order(kernel(GATHER, 0, 100, stream=20),
                 kernel("Memcpy PtoP (Device -> Device)", 0, 100, stream=21, cat="gpu_memcpy"))
    assert step.exposed_ms == 0.1 and not any(c.hidden for c in step.collectives)


WAITING = "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::PersistentAsyncInputScheduler<Cooperative>>>(P)"


def test_a_product_that_waits_inside_its_kernel_is_compute_and_the_account_says_so(tmp_path):
    path = trace(tmp_path / "t.json", kernel(WAITING, 0, 100), kernel(GATHER, 50, 120, stream=20), kernel(MM, 120, 150))
    found = read_order([path])
    (step,) = found.steps
    assert kind_of(WAITING) == COMPUTE and step.waiting_ms == 0.1 and step.collectives[0].exposed_ms == 0.02
    said = "0.10 ms of the compute are products that wait for other ranks inside their kernels, waits included"
    assert f"up to {said}: a trace cannot separate the wait from the product" in str(found)
    assert json.loads(found.to_json())["steps"][0]["waiting_ms"] == 0.1
    profile = step_profile([(WAITING, 0, 100), (GATHER, 50, 120), (MM, 120, 150)])
    assert profile.waiting_ms == 0.1 and said in str(profile)
    without = trace(tmp_path / "without.json", kernel(MM, 0, 100))
    for text in (str(read_order([without])), str(step_profile([(MM, 0, 100)]))):
        assert "inside" not in text


def test_steps_are_told_apart_by_when_their_kernels_were_launched(tmp_path):
    path = trace(tmp_path / "t.json", kernel(MM, 0, 90, launched=-5), kernel(GATHER, 95, 130, stream=20, launched=40),
                 kernel(MM, 140, 200, launched=120), kernel("warm-up", -500, -400, launched=-550),
                 marks=((3, -20, 50), (4, 100, 130)))
    found = read_order([path])
    assert [(s.step, s.launches, len(s.collectives)) for s in found.steps] == [
        ("ProfilerStep#3", 2, 1), ("ProfilerStep#4", 1, 0)]
    assert read_order([path], step="4").steps == found.steps[1:]
    with pytest.raises(WorkbenchError, match="t.json: no step 5: it has 3, 4$"):
        read_order([path], step="5")


def test_what_the_trace_says_of_a_collective_is_shown(order, tmp_path):
    step = order(kernel(GATHER, 0, 10, **{"Collective name": "_allgather_base", "In msg nelems": 1024,
                                          "dtype": "BFloat16", "Group size": 2}))
    assert step.collectives[0].about == "_allgather_base, 1024 elements, BFloat16, 2 ranks"
    assert "_allgather_base" in str(read_order([tmp_path / "t.json"]))


def test_of_two_ranks_the_one_that_comes_first_waits(tmp_path):
    early = trace(tmp_path / "0.json", kernel(GATHER, 0, 100, stream=20), rank=0)
    late = trace(tmp_path / "1.json", kernel(GATHER, 70, 100, stream=20), rank=1)
    found = read_order([early, late])
    assert [(s.rank, s.collectives[0].waits_ms) for s in found.steps] == [(0, 0.07), (1, 0.0)]
    assert "rank" in str(found).splitlines()[1]
    with pytest.raises(WorkbenchError, match="0.json: traces of ranks 0, 0: give one of each rank"):
        read_order([early, early])


def test_one_gpu_of_several_is_chosen(tmp_path):
    path = trace(tmp_path / "t.json", kernel(MM, 0, 1), kernel(MM, 0, 9, device=1))
    with pytest.raises(WorkbenchError, match="holds GPUs 0, 1: choose one with --device"):
        read_trace(path)
    with pytest.raises(WorkbenchError, match="holds no GPU 2: it holds 0, 1"):
        read_trace(path, 2)
    assert read_trace(path, 1).steps[0].events[0].end == 9


def test_a_step_is_shown_as_a_timeline(tmp_path):
    path = trace(tmp_path / "t.json", kernel(MM, 0, 50), kernel(GATHER, 52, 180, stream=20), kernel(MM, 181, 190))
    timeline = read_order([path]).timeline()
    assert timeline.lanes == ["compute", "stream 20"] and timeline.exposed_ms == pytest.approx(0.128)
    assert str(timeline).startswith("measured on NVIDIA H200: 0.19 ms")
    assert type(outputs(timeline, "timeline")[1]).__name__ == "TimelineView"


def test_concurrent_communication_is_told_apart_from_hidden(tmp_path):
    """Compute waits for the one that ends last; the other is concurrent with it, and both count once."""
    path = trace(tmp_path / "t.json", kernel(MM, 0, 50), kernel("ncclA", 60, 100, stream=20),
                 kernel("ncclB", 55, 150, stream=21), kernel("ncclC", 151, 190, stream=20), kernel(MM, 150, 200))
    found = read_order([path])
    timeline = found.timeline()
    assert [(s.limit == BEHIND_OTHERS, s.limit == HIDDEN) for s in timeline.collectives] == [
        (False, False), (True, False), (False, True)]  # in their order on the GPU: B, A, C
    assert [timeline.exposed_ms, found.steps[0].exposed_ms] == pytest.approx([0.095, 0.095])
    assert timeline.fates() == "1 of 3 collectives hidden behind compute and 1 behind exposed ones"
    assert "0.040 ms of it beside other communication" in str(found)
    picture, view, *_ = outputs(timeline, "timeline")
    assert "stream 20: 1 behind an exposed collective, 1 hidden" in picture.text
    assert [bar[4] for bar in unpacked(view.data)["runs"][0]["spans"] if bar[0] == "stream 20"] == [0, 0]


@pytest.mark.parametrize("variant", ON_TWO)
def test_the_timeline_of_a_real_trace_has_a_few_lanes_each_with_its_colour(variant):
    """A replay's streams are branches of a graph: 19 of them are one lane for each kind of communication."""
    found = read_order([RESULTS / f"traces_h200x2/{variant}.rank0.json.gz"])
    timeline = found.timeline(1)
    answer = unpacked(TimelineView(timeline).data)
    assert list(answer["colors"]) == timeline.lanes and 3 <= len(timeline.lanes) <= 4
    assert len(set(answer["colors"].values())) == len(timeline.lanes) and GREY not in answer["colors"].values()
    assert any(lane.startswith("replayed AllGather") for lane in timeline.lanes) is ("cudagraph" in variant)
    assert timeline.exposed_ms == pytest.approx(found.steps[1].exposed_ms)


def test_what_is_laid_beside_an_exposed_collective_of_a_real_trace_is_concurrent(tmp_path):
    whole = json.loads(gzip.decompress((RESULTS / "traces_h200x2/eager.rank0.json.gz").read_bytes()))
    nccl = [e for e in whole["traceEvents"] if "nccl" in e["name"]]
    before = read_order([RESULTS / "traces_h200x2/eager.rank0.json.gz"]).timeline(1)
    exposed = max(before.collectives, key=lambda span: span.exposed)
    event = next(e for e in nccl if abs(e["dur"] / 1e3 - exposed.ms) < 1e-6)
    inside = {"ts": event["ts"] + event["dur"] / 4, "dur": event["dur"] / 2}
    whole["traceEvents"].append(event | inside | {"args": event["args"] | {
        "stream": 99, "Process Group Description": '"mesh_tp"'}})
    path = tmp_path / "t.json"
    path.write_text(json.dumps(whole))
    after = read_order([path]).timeline(1)
    assert [s.limit for s in after.collectives if s.lane == "tp"] == [BEHIND_OTHERS]
    assert after.exposed_ms == pytest.approx(before.exposed_ms)


def test_compute_waits_for_the_communication_that_ends_last():
    chosen = random.Random(1)
    for _ in range(200):
        busy = union(sorted(chosen.sample(range(40), 2)) for _ in range(3))
        talk = [tuple(sorted(chosen.sample(range(40), 2))) for _ in range(4)]
        idle = [t for t in range(40) if not brute(busy, t, t + 1)]
        last = Counter(max((end, i) for i, (begin, end) in running)[1] for t in idle
                       if (running := [(i, span) for i, span in enumerate(talk) if span[0] <= t < span[1]]))
        assert waited_for(busy, talk) == [last[i] for i in range(4)]


def brute(intervals, begin, end):
    return sum(any(a <= t < b for a, b in intervals) for t in range(begin, end))


def test_overlaps_are_those_that_counting_gives():
    chosen = random.Random(0)
    for _ in range(200):
        cuts = sorted(chosen.sample(range(40), 8))
        intervals = list(zip(cuts[::2], cuts[1::2], strict=True))
        begin, end = sorted(chosen.sample(range(40), 2))
        covered = brute(intervals, begin, end)
        assert overlap(intervals, begin, end) == covered
        assert sum(b - a for a, b in gaps(intervals, begin, end)) == end - begin - covered


def on_cpu(path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(2, 2) @ torch.ones(2, 2)
    seen.export_chrome_trace(str(path))


def written(text):
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


BAD = {
    "of no GPU": ("cpu.json", on_cpu, "and none of a GPU \\(category kernel\\): profile with ProfilerActivity.CUDA"),
    "truncated": ("t.json", written('{"traceEvents": [{"ph": "X", "na'), "the file is truncated: export one with"),
    "empty": ("t.json", written(""), "line 1: Expecting value: the file is truncated"),
    "no JSON": ("t.json", written("step,ms\n1,2\n"), "this is no JSON|the file is truncated"),
    "of another tool": ("t.json", written('{"spans": []}'), "no list of traceEvents, so this is no trace"),
    "binary": ("t.pftrace", written(b"\x0a\xff\xfe\x00"), "a binary file, and a trace is JSON"),
    "half a gzip": ("t.json.gz", written(gzip.compress(b'{"traceEvents": []}' * 99)[:-9]), "not a whole gzip file"),
    "no gzip": ("t.json.gz", written("{}"), "not a whole gzip file"),
}


@pytest.mark.parametrize(("name", "write", "said"), BAD.values(), ids=BAD)
def test_what_is_no_trace_is_refused_with_its_name(tmp_path, capsys, name, write, said):
    write(tmp_path / name)
    with pytest.raises(WorkbenchError, match=f"{name}: .*({said})"):
        read_trace(tmp_path / name)
    assert main(["order", str(tmp_path / name)]) == 2 and name in capsys.readouterr().err


def test_a_trace_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_file, "MOST_BYTES", 100)
    for name, text in (("t.json", b"[" * 101), ("t.json.gz", gzip.compress(b"[" * 101))):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(WorkbenchError, match=f"{name}: larger than .*: profile fewer steps"):
            read_trace(tmp_path / name)


def test_the_command_prints_and_writes_what_it_found(tmp_path, capsys):
    path = trace(tmp_path / "t.json", kernel("cat", 0, 50), kernel(GATHER, 52, 180, stream=20), kernel(MM, 181, 190))
    assert main(["order", str(path), "--json", str(tmp_path / "o.json")]) == 0
    text = capsys.readouterr().out
    assert "whole trace" in text and "0.128 of 0.128 ms exposed: it starts when cat ends" in text
    data = json.loads((tmp_path / "o.json").read_text())
    assert data["device"] == "NVIDIA H200" and data["steps"][0]["collectives"][0]["why"].startswith("it starts when")
    assert main(["order", str(tmp_path / "gone.json")]) == 2
    assert "gone.json: No such file" in capsys.readouterr().err
