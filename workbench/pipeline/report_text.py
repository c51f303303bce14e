"""Verdicts as text: a row a pass, a column a check, what each says, and what was not checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from workbench.checks.verdicts import Outcome, Verdict, columns
from workbench.recipe.wording import aligned

_COLORS = {Outcome.PASS: "32", Outcome.FAIL: "1;31", Outcome.NO_EFFECT: "33", Outcome.UNKNOWN: "2"}
_OUTCOME = re.compile(rf"\b({'|'.join(Outcome)})\b")
NO_GRAPH = "compiled callables, and no graph to look at"


def painted(text: str, outcome: Outcome, color: bool) -> str:
    """Text in the colour of an outcome, for a terminal that shows colours."""
    return f"\033[{_COLORS[outcome]}m{text}\033[0m" if color else text


def outcomes(verdicts: Sequence[Verdict], checks: Sequence[str]) -> list[Outcome | None]:
    """The outcome of each check; None where it has no verdict."""
    known = {verdict.check: verdict.outcome for verdict in verdicts}
    return [known.get(check) for check in checks]


def verdict_grid(
    rows: Sequence[tuple[str, Sequence[Verdict]]], *, color: bool = False
) -> list[str]:
    """A line of heads, and a line for each (name, verdicts); a dash where a check has no verdict."""
    checks = columns(verdict for _, verdicts in rows for verdict in verdicts)
    cells = [
        [name, *(str(outcome or "-") for outcome in outcomes(verdicts, checks))]
        for name, verdicts in rows
    ]
    lines = aligned([["", *checks], *cells])

    def paint(word: re.Match[str]) -> str:
        return painted(word[0], Outcome(word[0]), color)

    return [_OUTCOME.sub(paint, line) for line in lines]


def said(verdict: Verdict) -> str:
    """The message, or what figures the evidence holds."""
    figures = (_figure(name.replace("_", " "), value) for name, value in verdict.evidence.items())
    return verdict.message or "; ".join(filter(None, figures))


def _figure(name: str, value: Any) -> str:
    """One entry of the evidence in a few words: long tables as their total, lists as their length."""
    if isinstance(value, dict) and value and all(isinstance(v, int) for v in value.values()):
        if len(value) > 3:
            return f"{name} {sum(value.values()):,}"
        return f"{name} " + ", ".join(f"{str(k).replace('_', ' ')} {v:,}" for k, v in value.items())
    if isinstance(value, list):
        if 0 < len(value) <= 3 and all(isinstance(v, int) for v in value):
            return f"{name} " + ", ".join(f"{v:,}" for v in value)
        return f"{name} {len(value)}"
    if isinstance(value, int):
        return f"{name} {value:,}"
    return f"{name} {value}" if isinstance(value, float | str) else ""


def unchecked(
    passes: Sequence[Sequence[Verdict]], others: Sequence[Verdict], not_run: str
) -> dict[str, list[str]]:
    """Each reason why something was not checked, and the checks it stands for.

    passes: the verdicts of each pass. not_run: why no graph was run, or "".
    """
    reasons: dict[str, list[str]] = {}

    def add(why: str, check: str) -> None:
        checks = reasons.setdefault(why, [])
        if check not in checks:
            checks.append(check)

    for verdicts in (*passes, others):
        for verdict in verdicts:
            if verdict.outcome is Outcome.UNKNOWN:
                add(verdict.message, verdict.check)
    for verdicts in passes:
        checks = {verdict.check for verdict in verdicts}
        for check in ("lint", "collectives"):
            if check not in checks:
                add(NO_GRAPH, check)
        if not_run and "numerics" not in checks:
            add(not_run, "numerics")
    return reasons


def memory_changes(memory: tuple[dict[str, int], dict[str, int]] | None) -> list[str]:
    """Each estimate that a pass changed, in bytes."""
    before, after = memory or ({}, {})
    return [f"{key.replace('_', ' of the ')} {size:,} to {after[key]:,} bytes (estimated)"
            for key, size in before.items() if key in after and size != after[key]]
