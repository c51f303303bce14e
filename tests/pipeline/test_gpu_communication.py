"""What communicates, by its name, and the time that spans cover, against counting."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from workbench.pipeline.gpu_communication import (
    COMPUTE,
    COPY,
    NCCL,
    SYMMETRIC,
    gaps,
    kind_of,
    overlap,
    union,
    waited_for,
)

KINDS = {
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": NCCL, "ncclSymkDevKernel_AllGather_LL": NCCL,
    "Memcpy PtoP (Device -> Device)": COPY, "Memcpy DtoD (Device -> Device)": COMPUTE,
    "(anonymous namespace)::barrier_kernel(unsigned int**, int, int, int, unsigned long)": SYMMETRIC,
    "void multimem_all_reduce_kernel<4>(__nv_bfloat16*)": SYMMETRIC, "one_shot_all_reduce_kernel": SYMMETRIC,
    "sm90_xmma_gemm_bf16": COMPUTE,
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=lambda value: value[:24])
def test_what_communicates(name, kind):
    assert kind_of(name) == kind


def counted(intervals, begin, end):
    return sum(any(a <= t < b for a, b in intervals) for t in range(begin, end))


def test_overlaps_and_gaps_are_those_that_counting_gives():
    chosen = random.Random(0)
    for _ in range(200):
        cuts = sorted(chosen.sample(range(40), 8))
        intervals = list(zip(cuts[::2], cuts[1::2], strict=True))
        begin, end = sorted(chosen.sample(range(40), 2))
        covered = counted(intervals, begin, end)
        assert overlap(intervals, begin, end) == covered
        assert sum(b - a for a, b in gaps(intervals, begin, end)) == end - begin - covered


def test_compute_waits_for_the_communication_that_ends_last():
    chosen = random.Random(1)
    for _ in range(200):
        busy = union(sorted(chosen.sample(range(40), 2)) for _ in range(3))
        talk = [tuple(sorted(chosen.sample(range(40), 2))) for _ in range(4)]
        last = Counter()
        for t in range(40):
            running = [(end, i) for i, (begin, end) in enumerate(talk) if begin <= t < end]
            if running and not counted(busy, t, t + 1):
                last[max(running)[1]] += 1
        assert waited_for(busy, talk) == [last[i] for i in range(4)]
