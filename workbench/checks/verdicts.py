"""What a check found, with its evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    PASS = "PASS"
    FAIL = "FAIL"
    NO_EFFECT = "NO_EFFECT"
    UNKNOWN = "UNKNOWN"


# Pale backgrounds for dark text, which readers who cannot tell red from green can tell apart.
FILLS = {Outcome.PASS: "#bfe5d9", Outcome.FAIL: "#f5c7a9", Outcome.NO_EFFECT: "#f7ee8f", Outcome.UNKNOWN: "#e6e6e6"}

CHECKS = ("lint", "effect", "collectives", "order", "numerics", "authoring")


@dataclass(frozen=True)
class Verdict:
    """One check's finding. `evidence` is plain JSON data; `message` is one line for the reader.

    UNKNOWN means that the check has no answer here, and `message` says why.
    """

    check: str
    outcome: Outcome
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"unknown check {self.check!r}: one of {', '.join(CHECKS)}")
        if self.outcome in (Outcome.FAIL, Outcome.UNKNOWN, Outcome.NO_EFFECT) and not self.message:
            raise ValueError(f"a verdict {self.outcome} says why")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.check}: {self.outcome}" + (f" ({self.message})" if self.message else "")


SEVERITY = (Outcome.FAIL, Outcome.NO_EFFECT, Outcome.UNKNOWN, Outcome.PASS)


def columns(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """The checks to show of passes: `order` only where one chose an order; `authoring` is of the step."""
    chose = any(v.check == "order" for v in verdicts)
    return tuple(c for c in CHECKS[:-1] if c != "order" or chose)


def verdict_of(verdicts: Iterable[Verdict], check: str) -> Verdict | None:
    """The verdict of that check; None where it has none."""
    return next((verdict for verdict in verdicts if verdict.check == check), None)


def worst(verdicts: Iterable[Verdict]) -> Outcome:
    """The gravest outcome, in the order of SEVERITY; UNKNOWN where there is no verdict."""
    return min((v.outcome for v in verdicts), key=SEVERITY.index, default=Outcome.UNKNOWN)
