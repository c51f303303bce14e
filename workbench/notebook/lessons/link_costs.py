"""Graders of "Bucket and overlap": the time of collectives, and the tokens that hide them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from workbench.graph.read.collectives import Collective
from workbench.graph.read.cost import DeviceSpec
from workbench.notebook.lessons.grading import close

PROBE = 2**25
"""Bytes of the gather that gives the bandwidth."""


def takes_twice(answer: Any, *, spec: DeviceSpec) -> tuple[float, str]:
    """Grades the bytes from which on an all-gather over 2 ranks takes twice its latency."""
    latency, ms = (spec.sending_ms("all_gather", 2, size) for size in (0, PROBE))
    return close(answer, truth=latency / (ms - latency) * PROBE)


def saves(answer: Any, *, before: Iterable[Collective], after: Iterable[Collective],
          spec: DeviceSpec) -> tuple[float, str]:
    """Grades the milliseconds of communication that merging saves."""
    return close(answer, truth=sent_ms(before, spec) - sent_ms(after, spec))


def hides(answer: Any, *, layer: Iterable[Collective], products_ms: float, tokens: int,
          spec: DeviceSpec) -> tuple[float, str]:
    """Grades the tokens for which products, `products_ms` for `tokens`, last as long as the layer's collectives.

    The message names two likely mistakes: products of the forward alone, and gathers alone.
    """
    listed = list(layer)
    truth = tokens * sent_ms(listed, spec) / products_ms
    gathers = sent_ms((c for c in listed if c.kind == "all_gather"), spec) / sent_ms(listed, spec)
    score, message = close(answer, truth=truth, within=0.15)
    for factor, said in ((3.0, "about three times the tokens"), (gathers, "tokens for the gathers alone")):
        if score < 1 and close(answer, truth=factor * truth, within=0.1)[0] >= 1:
            return score, said
    return score, message


def sent_ms(found: Iterable[Collective], spec: DeviceSpec) -> float:
    """How long these collectives take one after another."""
    return sum(spec.sending_ms(c.kind, c.group_size, c.payload) for c in found)
