"""Answers to the checkpoints of 14_read_your_own_trace; kept apart from the notebook."""

from collections.abc import Callable
from itertools import pairwise


def floor(kinds_of, eager) -> float:
    """Products, attention and the optimizer stay."""
    ms = kinds_of(eager)
    return round(ms["products"] + ms["attention"] + ms["optimizer"], 2)


def late(gaps_of, eager) -> float:
    """Gaps whose next kernel was launched after the gap began, in milliseconds."""
    return sum(end - begin for begin, end, launched in gaps_of(eager) if launched > begin) / 1e3


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
