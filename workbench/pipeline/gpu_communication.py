"""Events of a GPU's profile: which communicate, by their names, and the time that events cover. No torch here."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
COMPUTE, NCCL, COPY, SYMMETRIC = "compute", "NCCL", "peer copy", "symmetric memory"
NEGLIGIBLE = 0.05
"""A collective is hidden where less than this part of it is exposed."""
_SYMMETRIC = re.compile(
    r"(barrier|put_signal|wait_signal)_kernel|(one|two)_shot_all_reduce|multimem_|nvshmem|symm_mem|"
    r"stream_(write|wait)_value",
    re.I,
)


def kind_of(name: str) -> str:
    """COMPUTE, or how the event communicates: by NCCL, by a copy from GPU to GPU, or through symmetric memory.

    Names as CUPTI gives them; those of symmetric memory are the kernels of
    torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu. A fused operator that `waits_inside` its own kernel
    counts as COMPUTE.
    """
    if "nccl" in name.lower():
        return NCCL
    if name.startswith("Memcpy"):
        return COPY if "PtoP" in name else COMPUTE
    return SYMMETRIC if _SYMMETRIC.search(name) else COMPUTE


def waits_inside(name: str) -> bool:
    """Whether the kernel multiplies and waits for what other ranks send: for how long it waits, no profile says.

    It is torch.ops.symm_mem._async_input_mm, a part of fused_all_gather_matmul.
    """
    return "PersistentAsyncInput" in name


def waits_counted(ms: float) -> str:
    """What an account says of the kernels that wait inside, which take `ms`."""
    return f"{ms:,.2f} ms of the compute are products that wait for other ranks inside their kernels, waits included"


def host_copy(name: str) -> bool:
    """Whether the event copies to or from pinned host memory. `kind_of` calls it COMPUTE: a batch arrives like that."""
    return name.startswith("Memcpy") and "PtoP" not in name and "Pinned" in name


def union(spans: Iterable[Interval], near: float = 0.0) -> list[Interval]:
    """The times that any of the (begin, end) spans covers, as intervals in order; those within `near` become one."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1] + near:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def overlap(intervals: Sequence[Interval], begin: float, end: float) -> float:
    """How much of the time from begin to end the intervals cover; they are as `union` returns them."""
    return end - begin - length(gaps(intervals, begin, end))


def waited_for(busy: Sequence[Interval], talk: Sequence[Interval]) -> list[float]:
    """How long each communication alone holds up compute.

    Where several overlap, the time counts for the one that ends last. busy: when compute runs, as `union` returns it.
    """
    waits, first = [0.0] * len(talk), float("inf")
    for i in sorted(range(len(talk)), key=lambda i: (talk[i][1], i), reverse=True):
        begin, end = talk[i]
        waits[i] = length(gaps(busy, begin, min(end, max(begin, first))))
        first = min(first, begin)
    return waits


def gaps(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """The parts of the time from begin to end that no interval covers; intervals as `union` returns them."""
    uncovered, at = [], begin
    first = max(0, bisect_right(intervals, (begin, float("inf"))) - 1)
    for i in range(first, len(intervals)):
        a, b = intervals[i]
        if a >= end:
            break
        if a > at:
            uncovered.append((at, a))
        at = max(at, b)
    return [*uncovered, (at, end)] if at < end else uncovered
