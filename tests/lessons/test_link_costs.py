"""Graders of what collectives cost, on collectives with round figures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.graph.read.cost import device_spec
from workbench.graph.read.simulated_run import Span, StepTimeline
from workbench.notebook.lessons.lesson import load_lesson
from workbench.torch_api.devices.profile import MeasuredSpec
from workbench_lessons.l05_bucket_and_overlap.link_costs import PROBE, ModuleCosts, hides, links_like, margin_ms, saves

LESSON = "05_bucket_and_overlap"
SPEC: Any = SimpleNamespace(sending_ms=lambda kind, size, payload: 1.0 + 4.0 * payload / PROBE)
"""A latency of 1 ms, and 4 ms for the bytes of the probe."""


def sent(kind: str, payload: int, count: int = 1) -> list[Any]:
    return [SimpleNamespace(kind=kind, group_size=2, payload=payload) for _ in range(count)]


def test_the_margin_is_what_the_machines_errors_leave_open() -> None:
    spec = device_spec("h200x2")
    assert isinstance(spec, MeasuredSpec) and spec.profile is not None
    run = StepTimeline("simulated on paper", (Span("a", "tp", 0.0, 1.0, 2.0, "latency"),), 12.0, 10.0)
    errors = spec.profile.errors
    assert margin_ms(spec, run) == pytest.approx(10 * errors["compute"] + 2 * errors["exposure"])


def test_another_link_has_the_latency_of_the_measured_one_and_its_own_rate() -> None:
    spec, gbps = device_spec("h200x2"), 50
    assert isinstance(spec, MeasuredSpec)
    other = device_spec(links_like(spec, gbps)[gbps])
    latency = other.sending_ms("all_gather", 2, 0)
    assert latency == spec.sending_ms("all_gather", 2, 0)
    assert PROBE / (other.sending_ms("all_gather", 2, PROBE) - latency) / 1e6 == pytest.approx(gbps)
    assert other.moving_ms(1e6) == spec.moving_ms(1e6) and "error unknown" in other.trust


def hints(checkpoint: str, said: str) -> int:
    """How many of the lesson's hints react to what a grader says."""
    return len([words for words in load_lesson(LESSON).checkpoint(checkpoint).reacts if words in said])


def test_merging_saves_latencies() -> None:
    apart = sent("all_gather", PROBE, 2) + sent("reduce_scatter", PROBE // 4, 3)
    merged = sent("all_gather", 2 * PROBE) + sent("reduce_scatter", 3 * PROBE // 4)
    for answer, said in ((3.0, "right"), (3000.0, "microseconds"), (13.0, "the time that is left"),
                         (1.0, "the gathers alone")):
        assert saves(answer, before=apart, after=merged, spec=SPEC) == (float(said == "right"), said)
        assert hints("latency_saved", said) == (said != "right")


def test_the_hint_names_what_was_forgotten() -> None:
    spec: Any = SimpleNamespace(profile=SimpleNamespace(errors={"compute": 0.05}))
    layer = ModuleCosts(flop=6e9, matmul_ms=1.0, gather_ms=5.0, scatter_ms=5.0, sent_bytes=8e6)
    layer = replace(layer, flop=7.5 * layer.sent_bytes / layer.sent_ms * 1e3)  # so that the law says 7,500
    for answer, said in ((30_000, "about three times the tokens"), (5_000, "tokens for the gathers alone"),
                         (1, "too low"), (7_500, "a weight that is gathered once"), (10_000, "right")):
        score, message = hides(answer, layer=layer, tokens=1_000, spec=spec)
        assert (message, score >= 1) == (said, said == "right")
        assert hints("tokens_to_hide", said) == (said != "right")
