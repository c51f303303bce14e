"""Answers to the checkpoints of 14_read_your_own_trace; kept apart from the notebook."""

from collections.abc import Callable
from itertools import pairwise


def late(gaps_of, eager) -> tuple[float, float]:
    """Gaps whose next kernel was launched after the gap began, in milliseconds: in the first 2 ms, and later."""
    sums, start = [0.0, 0.0], eager.events[0].begin
    for begin, end, launched in gaps_of(eager):
        if launched > begin:
            sums[begin - start >= 2000] += (end - begin) / 1e3
    return sums[0], sums[1]


def exposed_time() -> Callable:
    """Time is cut where a kernel begins or ends."""

    def exposed(spans):
        cuts = sorted({time for *_, begin, end in spans for time in (begin, end)})
        total = 0.0
        for a, b in pairwise(cuts):
            running = {name.startswith("nccl") for name, _, _, begin, end in spans if begin <= a and b <= end}
            total += b - a if running == {True} else 0.0
        return total

    return exposed


def remedy(kinds_of, third) -> tuple[str, float]:
    """Compute above the floor is the largest loss, and fusion can remove that at most."""
    step, ms = third.steps[-1], kinds_of(third.traced[-1])
    return "full_inductor_compilation", step.compute_ms - ms["matmuls"] - ms["attention"] - ms["optimizer"]
