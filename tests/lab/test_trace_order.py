"""`workbench order`: traces made by hand, one cause each, and what is no trace."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.graph.read.simulated_run import BEHIND_OTHERS, HIDDEN
from workbench.lab.traces import read_order
from workbench.lab.traces.trace_file import read_trace
from workbench.pipeline.step_profile import Kernel, step_profile

GATHER, MM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "sm90_xmma_gemm_bf16"
LONG_AGO = -1000.0


def kernel(name, begin, end, *, stream=7, launched=LONG_AGO, call="cudaLaunchKernel", cat="kernel", device=0, **about):
    """A kernel and the CPU's call for it, which ends at `launched`; times in microseconds."""
    return [(cat, name, begin, end, {"device": device, "stream": stream, **about}),
            *([("cuda_runtime", call, launched - 5, launched, {})] if call else [])]


def trace(path, *kernels, marks=(), rank=None, world_size=2, name="NVIDIA H200", base=0):
    events = []
    for number, parts in enumerate(kernels):
        events += [{"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "pid": 0, "tid": 1,
                    "args": {**args, "correlation": number}} for cat, name, begin, end, args in parts]
    events += [{"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": a, "dur": b - a}
               for i, a, b in marks]
    data = {"traceEvents": events, "deviceProperties": [{"id": 0, "name": name}], "baseTimeNanoseconds": base}
    if rank is not None:
        data["distributedInfo"] = {"rank": rank, "world_size": world_size}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def order(tmp_path):
    """The one step of a trace of these kernels."""
    return lambda *kernels: read_order([trace(tmp_path / "t.json", *kernels)]).steps[0]


REASONS = [
    ([kernel(MM, 0, 50), kernel(GATHER, 80, 180, stream=20), kernel("softmax", 182, 190)], "softmax waits for it"),
    ([kernel("cat", 0, 50), kernel(GATHER, 52, 180, stream=20)], "it starts when cat ends, whose result it may send"),
    ([kernel("cat", 0, 50), kernel(GATHER, 52, 180, stream=20), kernel(MM, 181, 190)],
     f"it starts when cat ends, whose result it may send; {MM} waits for it"),
    ([kernel(MM, 0, 99), kernel("ncclA", 10, 100, stream=20), kernel("ncclB", 101, 300, stream=20)],
     "its stream was busy with ncclA"),
    ([kernel(MM, 0, 50), kernel(GATHER, 200, 300, stream=20, launched=195)],
     "the CPU launched it late, when the GPU had nothing else to do"),
    ([kernel(MM, 0, 50), kernel(GATHER, 200, 300, stream=20, launched=195, call="cudaGraphLaunch")],
     "no compute was ready to run meanwhile"),
]


def test_why_a_collective_is_exposed(order):
    for kernels, why in REASONS:
        last = order(*kernels).collectives[-1]
        assert last.why == why and last.exposed_ms > 0


RESULTS = Path(__file__).parents[2] / "benchmarks/results"
REPLAYED = "llama3_full_inductor_block_bucketing_overlap_cudagraph"


@pytest.mark.parametrize("variant", ["eager", REPLAYED])
def test_a_trace_of_a_real_job_says_what_the_benchmark_measured_of_another_step(variant):
    """The benchmark's figures are those of its last first round."""
    lines = (RESULTS / "llama3_1b_h200x2.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = map(json.loads, lines)
    measured = [line for line in rounds if line["variant"] == variant and line["round"] == 0
                and line["recipe"]["mesh"]["tp"] == 1][-1]
    order = read_order([RESULTS / f"traces_h200x2/{variant}.rank{rank}.json.gz" for rank in range(2)])
    steps, timeline = order.steps, order.timeline(1)
    assert len(steps) == 4 and timeline.exposed_ms == pytest.approx(steps[1].exposed_ms)
    # a replay's 19 streams are branches of a graph: one lane for each kind of communication
    assert 3 <= len(timeline.lanes) <= 4
    replayed = [lane for lane in timeline.lanes if lane.startswith("replayed AllGather")]
    assert bool(replayed) is (variant == REPLAYED)
    for step in steps:
        assert step.launches == measured["launches"] and step.communication_ms > 15
        assert step.span_ms == pytest.approx(step.compute_ms + step.exposed_ms + step.idle_ms)
        if not step.rank:  # the benchmark's figures are rank 0's
            assert step.compute_ms == pytest.approx(measured["kernels_ms"], rel=0.05)
        assert (step.exposed_ms < 5) is (variant == REPLAYED)  # a replay hides it


def test_compute_hides_communication_and_communication_does_not(order):
    step = order(kernel(MM, 0, 100), kernel(GATHER, 10, 90, stream=20, **{
        "Collective name": "_allgather_base", "In msg nelems": 1024, "dtype": "BFloat16", "Group size": 2}))
    (gather,) = step.collectives
    assert gather.hidden and gather.exposed_ms == 0 and gather.behind == {MM: 0.08}
    assert gather.about == "_allgather_base, 1024 elements, BFloat16, 2 ranks"
    assert (step.span_ms, step.compute_ms, step.communication_ms, step.idle_ms, step.launches) == (0.1, 0.1, 0.08, 0, 2)
    step = order(kernel("ncclA", 0, 100, stream=20), kernel("ncclB", 50, 150, stream=21))
    assert step.exposed_ms == step.communication_ms == 0.15 and step.compute_ms == 0
    assert [(c.exposed_ms, c.shared_ms) for c in step.collectives] == [(0.1, 0.05)] * 2


WAITING = "void cutlass::device_kernel<GemmUniversal<cutlass::gemm::PersistentAsyncInputScheduler<Cooperative>>>(P)"


def test_a_product_that_waits_inside_its_kernel_is_compute_and_the_account_says_so(tmp_path):
    path = trace(tmp_path / "t.json", kernel(WAITING, 0, 100), kernel(GATHER, 50, 120, stream=20), kernel(MM, 120, 150))
    order = read_order([path])
    assert order.steps[0].waiting_ms == 0.1 and order.steps[0].collectives[0].exposed_ms == 0.02
    account = "0.10 ms of the compute are products that wait for other ranks inside their kernels, waits included"
    assert f"up to {account}: a trace cannot separate the wait from the product" in str(order)
    spans = (WAITING, 0, 100), (GATHER, 50, 120), (MM, 120, 150)
    assert account in str(step_profile([Kernel(name, 7, begin, end) for name, begin, end in spans]))


def test_steps_are_told_apart_by_when_their_kernels_were_launched(tmp_path):
    path = trace(tmp_path / "t.json", kernel(MM, 0, 90, launched=-5), kernel(GATHER, 95, 130, stream=20, launched=40),
                 kernel(MM, 140, 200, launched=120), kernel("warm-up", -500, -400, launched=-550),
                 marks=((3, -20, 50), (4, 100, 130)))
    steps = read_order([path]).steps
    assert [(s.step, s.launches, len(s.collectives)) for s in steps] == [
        ("ProfilerStep#3", 2, 1), ("ProfilerStep#4", 1, 0)]
    assert read_order([path], step="4").steps == steps[1:]
    with pytest.raises(WorkbenchError, match="t.json: no step 5: it has 3, 4$"):
        read_order([path], step="5")


def test_what_the_warm_up_left_running_and_what_has_no_time_is_in_no_step(tmp_path):
    """CUPTI records the end of kernels whose launch it did not see, and sometimes a kernel without a begin."""
    step = [kernel(MM, 9e8 + 100, 9e8 + 200, launched=9e8 + 10), kernel("memset", 9e8 + 200, 9e8 + 210, call=None)]
    warm_up = kernel("warm-up", 9e8 - 20, 9e8 + 90, call=None), kernel("ncclOld", 9e8, 9e8 + 80, call=None, stream=20)
    untimed = kernel("untimed", 0, 5, launched=9e8 + 12)
    order = read_order([trace(tmp_path / "t.json", *warm_up, untimed, *step, marks=((3, 9e8, 9e8 + 300),))])
    (seen,) = order.steps
    assert (seen.span_ms, seen.compute_ms, seen.collectives) == (0.11, 0.11, ())
    assert ("left out: 3 GPU events, 0.12 ms in all, launched before the trace began or timed before the launch: "
            "untimed first") in str(order).splitlines()
    assert order.left_out[0] in order.to_json()
    without_calls = trace(tmp_path / "u.json", kernel(MM, 0, 50, call=None), marks=((3, 0, 90),))
    assert read_order([without_calls]).left_out == ()


def test_traces_of_one_rank_or_of_two_jobs_are_refused(tmp_path):
    gather = kernel(GATHER, 0, 100, stream=20)
    here = trace(tmp_path / "0.json", gather, rank=0)
    with pytest.raises(WorkbenchError, match="0.json: traces of ranks 0, 0: give one of each rank"):
        read_order([here, here])
    larger = trace(tmp_path / "8.json", gather, rank=1, world_size=8)
    with pytest.raises(WorkbenchError, match="8.json: its job has 8 ranks, and that of .*0.json 2 ranks: give traces"):
        read_order([here, larger])
    later = trace(tmp_path / "l.json", gather, rank=1, base=200_000)
    with pytest.raises(WorkbenchError, match="l.json: none of its steps ran while those of .*0.json did: give traces"):
        read_order([here, later])
    early, late = read_order([here, trace(tmp_path / "1.json", gather, rank=1, base=50_000)]).steps
    assert (early.rank, late.rank) == (0, 1)


def test_a_trace_of_an_older_torch_and_a_gpu_without_a_name(tmp_path):
    """torch before 1.12 wrote the categories with capitals, and steps as operators."""
    path = trace(tmp_path / "t.json", kernel(MM, 0, 90, cat="Kernel", launched=-5), kernel(GATHER, 95, 130, launched=8),
                 kernel("Memset (Device)", 131, 140, cat="Memset", call=None), marks=((3, -20, 50),), name="")
    old = path.read_text().replace("cuda_runtime", "Runtime").replace("user_annotation", "Operator")
    path.write_text(old)
    order = read_order([path])
    (step,) = order.steps
    assert (order.device, step.step, step.launches, len(step.collectives)) == ("GPU 0", "ProfilerStep#3", 2, 1)
    assert "ProfilerStep#3: the collective that is exposed longest" in str(order)


def test_one_gpu_of_several_is_chosen(tmp_path):
    path = trace(tmp_path / "t.json", kernel(MM, 0, 1), kernel(MM, 0, 9, device=1))
    with pytest.raises(WorkbenchError, match="holds GPUs 0, 1: choose one with --device"):
        read_trace(path)
    with pytest.raises(WorkbenchError, match="holds no GPU 2: it holds 0, 1"):
        read_trace(path, 2)
    assert read_trace(path, 1).steps[0].events[0].end == 9


def test_concurrent_communication_is_told_apart_from_hidden(tmp_path):
    """Compute waits for the one that ends last; the other is concurrent with it, and both count once."""
    path = trace(tmp_path / "t.json", kernel(MM, 0, 50), kernel("ncclA", 60, 100, stream=20),
                 kernel("ncclB", 55, 150, stream=21), kernel("ncclC", 151, 190, stream=20), kernel(MM, 150, 200))
    order = read_order([path])
    timeline = order.timeline()
    assert timeline.lanes == ["compute", "stream 21", "stream 20"]
    assert str(timeline).startswith("measured on NVIDIA H200: 0.20 ms")
    assert [(s.limit == BEHIND_OTHERS, s.limit == HIDDEN) for s in timeline.collectives] == [
        (False, False), (True, False), (False, True)]  # in their order on the GPU: B, A, C
    assert [timeline.exposed_ms, order.steps[0].exposed_ms] == pytest.approx([0.095, 0.095])
    assert timeline.fates() == "1 of 3 collectives hidden behind compute and 1 behind exposed ones"
    assert "0.040 ms of it beside other communication" in str(order)


def test_what_is_no_trace_of_a_gpu_is_refused_with_its_name(tmp_path):
    """Other damaged traces: tests/odd_inputs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        torch.ones(2, 2) @ torch.ones(2, 2)
    seen.export_chrome_trace(str(tmp_path / "cpu.json"))
    (tmp_path / "half.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}' * 99)[:-9])
    for name, why in [
        ("cpu.json", r"no event of a GPU \(category kernel\): profile with ProfilerActivity.CUDA"),
        ("half.json.gz", "not a whole gzip file"),
    ]:
        with pytest.raises(WorkbenchError, match=f"{name}.*{why}"):
            read_trace(tmp_path / name)
