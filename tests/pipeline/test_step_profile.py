"""Time under kernels, from spans written by hand."""

import random
from collections import Counter

import pytest
import torch
from torch.profiler import profile, record_function

from workbench.pipeline import gpu_communication as gpu
from workbench.pipeline.step_profile import Kernel, StepProfile, since, step_profile


def kernel(name, begin, end):
    return Kernel(name, 7, begin, end)


def test_exposed_is_what_no_compute_kernel_covers():
    spans = [kernel("matmul", 0, 4000), kernel("ncclDevKernel_AllGather_RING_LL(x)", 3000, 6000),
             kernel("add", 5500, 7000), kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", 1000, 2000)]
    by = {"AllGather": 1.5, "ReduceScatter": 0.0}
    found = step_profile([*spans, kernel("add", 6000, 6500)], 3)
    assert list(found.longest.items())[:2] == [("matmul", 4.0), ("ncclDevKernel_AllGather_RING_LL(x)", 3.0)]
    assert found.longest["add"] == 2.0
    found = step_profile(spans, 3)
    assert found == StepProfile(5.5, 4.0, 1.5, kernels=4, launches=3, exposed_by=by, longest=found.longest)


def test_a_peer_copy_and_a_barrier_hide_no_collective():
    waiting = [kernel("Memcpy PtoP (Device -> Device)", 0, 100), kernel("(anonymous)::barrier_kernel(int)", 100, 150)]
    found = step_profile([kernel("ncclDevKernel_AllGather_RING_LL(x)", 0, 100), *waiting, kernel("gemm", 140, 200)])
    assert (found.nccl_ms, found.exposed_nccl_ms, found.kernels_ms) == pytest.approx((0.15, 0.14, 0.06))


def test_what_ran_before_the_mark_does_not_count():
    x = torch.ones(4)
    with profile(acc_events=True) as seen:
        x.exp()
        with record_function("mark"):
            x.sin()
    names = {e.name for e in seen.events()}
    assert {"aten::exp", "aten::sin", "mark"} <= names
    assert {e.name for e in since(seen.events(), "mark") if e.name.startswith("aten")} == {"aten::sin"}


# What communicates, by its name, and the time that spans cover, against counting.

KINDS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": gpu.NCCL,
    "ncclSymkDevKernel_AllGather_LL": gpu.NCCL,
    "Memcpy PtoP (Device -> Device)": gpu.COPY, "Memcpy DtoD (Device -> Device)": gpu.COMPUTE,
    "(anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)": gpu.SYMMETRIC,
    "void multimem_all_reduce_kernel<4>(__nv_bfloat16*)": gpu.SYMMETRIC, "one_shot_all_reduce_kernel": gpu.SYMMETRIC,
    "sm90_xmma_gemm_bf16": gpu.COMPUTE,
}


def test_what_communicates():
    assert {name: gpu.kind_of(name) for name in KINDS} == KINDS


def counted(intervals, begin, end):
    return sum(any(a <= t < b for a, b in intervals) for t in range(begin, end))


def test_overlaps_and_gaps_are_those_that_counting_gives():
    chosen = random.Random(0)
    for _ in range(200):
        cuts = sorted(chosen.sample(range(40), 8))
        intervals = list(zip(cuts[::2], cuts[1::2], strict=True))
        begin, end = sorted(chosen.sample(range(40), 2))
        covered = counted(intervals, begin, end)
        assert gpu.overlap(intervals, begin, end) == covered
        assert sum(b - a for a, b in gpu.gaps(intervals, begin, end)) == end - begin - covered


def test_compute_waits_for_the_communication_that_ends_last():
    chosen = random.Random(1)
    for _ in range(200):
        busy = gpu.union(sorted(chosen.sample(range(40), 2)) for _ in range(3))
        talk = [tuple(sorted(chosen.sample(range(40), 2))) for _ in range(4)]
        last = Counter()
        for t in range(40):
            running = [(end, i) for i, (begin, end) in enumerate(talk) if begin <= t < end]
            if running and not counted(busy, t, t + 1):
                last[max(running)[1]] += 1
        assert gpu.waited_for(busy, talk) == [last[i] for i in range(4)]
