"""A grader: the first node whose value is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_of(answer: Any, *, truth: str, order: Sequence[str]) -> tuple[float, str]:
    """Asks for the first node whose value is wrong. order: the names of all nodes, as they run. A node is its name."""
    name = str(getattr(answer, "name", answer)).strip()
    if name not in order:
        return 0.0, f"no node {name!r} in the graph"
    if name == truth:
        return 1.0, "right"
    if order.index(name) < order.index(truth):
        return 0.0, f"the value of {name!r} is still right"
    return 0.0, f"the first wrong value comes before {name!r}"
