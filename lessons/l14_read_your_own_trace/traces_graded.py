"""Graders of "Read your own trace"."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from workbench.errors import temporary
from workbench.lab.traces import read_order
from workbench_lessons.course.grading import by_cases, close
from workbench_lessons.l14_read_your_own_trace.traces import (
    FUSED,
    THIRD,
    Span,
    floor_ms,
    kinds_of,
    last_of,
    late_gaps,
    late_ms,
    late_parts,
    recorded,
    save_spans,
    spans_of,
    third_job,
    timed,
)


def lateness(answer: Any) -> tuple[float, str]:
    """Grades `late_parts` of the recorded eager step: each part is right or wrong, and on which side.

    The sum of launch less begin is within 1 % of the later part, so it is told by the first part.
    """
    try:
        first, later = map(float, answer)
    except (TypeError, ValueError):
        return 0.0, "give a pair of numbers: (in the first 2 ms, later)"
    step = read_order([recorded("eager")]).traced[-1]
    truths = late_parts(step)
    if meant(first, sum(by - begin for begin, _, by in late_gaps(step) if begin < step.events[0].begin + 2000) / 1e3):
        return 0.0, "these gaps end at the launch"
    parts = {said: near(got, truth=truth) for said, got, truth in zip(
        ("in the first 2 ms", "later"), (first, later), truths, strict=True)}
    wrong = [f"{said} {message}" for said, (score, message) in parts.items() if score < 1]
    return 1 - len(wrong) / 2, "; ".join(wrong) or "right"


def remedies(answer: Any) -> tuple[float, str]:
    """Grades the remedy for `third_job`, and the most milliseconds that it can win; either rank's are right."""
    try:
        name, ms = str(answer[0]).lower(), float(answer[1])
    except (TypeError, ValueError, LookupError):
        return 0.0, "give a pair: (remedy, milliseconds)"
    last = last_of(third_job())
    if "cudagraph" in name:
        return 0.0, f"not cudagraph: the CPU is late for {max(late_ms(traced) for _, traced in last):.1f} ms"
    if "overlap" in name or "bucket" in name:
        return 0.0, f"not overlap: {max(step.exposed_ms for step, _ in last):.1f} ms are exposed at most"
    if "fusion" not in name and "inductor" not in name:
        return 0.0, "name one of the three remedies"
    scores = [near(ms, truth=step.compute_ms - floor_ms(traced), within=0.02) for step, traced in last]
    score, message = max(scores)
    if score < 1:
        sums = [kinds["copies"] + kinds["rest"] for kinds in (kinds_of(traced) for _, traced in last)]
        summed = any(meant(ms, total, 0.01) for total in sums)
        return 0.5, f"milliseconds {'of all copies and `rest`' if summed else message}"
    before, after = (median(timed(job, 2)) for job in (THIRD, FUSED))
    return 1.0, f"right: with torch.compile for each block, a step takes {after:.1f} ms instead of {before:.1f}"


def near(answer: Any, *, truth: float, within: float = 0.01) -> tuple[float, str]:
    """Grades a number: right or wrong, and on which side."""
    score, message = close(answer, truth=truth, within=within)
    return float(score >= 1), message


def meant(answer: Any, slip: float, within: float = 0.005) -> bool:
    """Whether a number is what a known slip computes."""
    return close(answer, truth=slip, within=within)[0] >= 1


def _cases() -> Iterator[tuple[str, list[Span]]]:
    yield "one matmul", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 50, 150)]
    yield "a hidden collective", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 20, 90)]
    yield "idle time", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 150, 250), ("b", 7, 0, 300, 310)]
    yield "two matmuls at once", [("a", 7, 0, 0, 60), ("b", 8, 0, 40, 100), ("ncclA", 20, 0, 0, 120)]
    yield "two collectives at once", [("a", 7, 0, 0, 20), ("ncclA", 20, 0, 20, 120), ("ncclB", 21, 0, 70, 170)]
    seed = random.Random(7)
    for _ in range(20):
        spans = []
        for number in range(10):
            begin = float(seed.randrange(500))
            name, streams = ("ncclA", (20, 21)) if number % 2 else ("a", (7, 8))
            spans.append((name, seed.choice(streams), 0.0, begin, begin + seed.randrange(10, 120)))
        yield "ten kernels at random", spans
    yield "a recorded step", spans_of(read_order([recorded("compile", 0, 2)]).traced[-1])


def exposes(answer: Any) -> tuple[float, str]:
    """Grades a function from spans to exposed microseconds by what `workbench order` says of the same spans.

    The message names the first kind of case that is wrong. What is wrong with one matmul scores 0.
    """
    if not callable(answer):
        return 0.0, "give a function of a list of spans"
    return by_cases(answer, _cases(), _problem, "one matmul")


def _problem(answer: Callable[[list[Span]], Any], spans: list[Span]) -> str:
    with temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-spans-")) as folder:
        wanted = 1e3 * read_order([save_spans(spans, Path(folder) / "spans.json")]).steps[0].exposed_ms
    try:
        got = float(answer(list(spans)))
    except Exception as error:  # the reader's code
        return f"{type(error).__name__}: {error}"
    if abs(got - wanted) < 1e-6 * max(1.0, wanted):
        return ""
    listed = ", ".join(f"{name} {begin:g}-{end:g}" for name, _, _, begin, end in spans) if len(spans) <= 10 else ""
    return f"got {got:g} µs, wanted {wanted:g} µs" + (f", of {listed}" if listed else f", of {len(spans):,} kernels")
