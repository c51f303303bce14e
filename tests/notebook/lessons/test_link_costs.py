"""Graders of what collectives cost, on collectives with round figures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workbench.notebook.lessons.lesson import load_lesson
from workbench.notebook.lessons.link_costs import PROBE, hides, saves, takes_twice

LESSON = "05_bucket_and_overlap"
SPEC: Any = SimpleNamespace(sending_ms=lambda kind, size, payload: 1.0 + 4.0 * payload / PROBE)
"""A latency of 1 ms, and 4 ms for the bytes of the probe."""


def sent(kind: str, payload: int, count: int = 1) -> list[Any]:
    return [SimpleNamespace(kind=kind, group_size=2, payload=payload) for _ in range(count)]


def test_twice_the_latency_is_the_latency_times_the_bandwidth() -> None:
    assert takes_twice(PROBE // 4, spec=SPEC) == (1.0, "right")
    assert takes_twice(PROBE, spec=SPEC)[1] == "too high"


def test_merging_two_saves_one_latency() -> None:
    apart, merged = sent("all_gather", PROBE, 2), sent("all_gather", 2 * PROBE)
    assert saves(1.0, before=apart, after=merged, spec=SPEC) == (1.0, "right")
    assert saves(2.0, before=apart, after=merged, spec=SPEC)[1] == "too high"


@pytest.mark.parametrize(("answer", "said"), [
    (30_000, "about three times the tokens"), (5_000, "tokens for the gathers alone"), (1, "too low"),
    (14_000, "too high"), (10_000, "right")])
def test_the_hint_names_what_was_forgotten(answer: int, said: str) -> None:
    layer = sent("all_gather", PROBE) + sent("reduce_scatter", PROBE)
    score, message = hides(answer, layer=layer, products_ms=1.0, tokens=1_000, spec=SPEC)
    assert (message, score >= 1) == (said, said == "right")
    reacts = load_lesson(LESSON).checkpoint("tokens_to_hide").reacts
    assert len([words for words in reacts if words in message]) == (said != "right")
