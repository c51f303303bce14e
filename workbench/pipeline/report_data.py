"""What one run of a recipe did, proved and measured, as plain data."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.checks.verdicts import Outcome, Verdict, verdict_of, worst
from workbench.graph.read.peak import StepPeak
from workbench.pipeline.roofline import Roofline
from workbench.pipeline.step_profile import StepProfile
from workbench.pipeline.train import Training
from workbench.recipe.contracts import Numerics, Stage
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import json_text

FORMAT_VERSION = 2


@dataclass(frozen=True)
class PassRow:
    """One pass: what it promised, what it took (seconds of wall time) and its verdicts, at most one for each check.

    memory: estimated bytes before and after the pass, by name; None where there was no graph. ran_for: seconds that its
    graphs ran for, before and after, on the slowest rank; None where they did not run.
    """

    name: str
    stage: Stage
    numerics: Numerics
    tolerance: float | None
    seconds: float
    verify_seconds: float
    verdicts: list[Verdict]
    allowed_idle: bool = False
    memory: tuple[dict[str, int], dict[str, int]] | None = None
    ran_for: tuple[float, float] | None = None

    @property
    def outcome(self) -> Outcome:
        return worst(self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The verdict of that check; None where it has none."""
        return verdict_of(self.verdicts, check)


@dataclass(frozen=True)
class Peak:
    """The step's peak memory on one rank: as the graphs predict it, and the bytes that CUDA's allocator has measured.

    predicted: None for a step without graphs, as an artifact runs it. measured: None on a CPU.
    """

    predicted: StepPeak | None
    measured: int | None

    @property
    def off(self) -> float | None:
        """By which share of the measured peak the prediction is too high."""
        return (
            self.predicted.bytes / self.measured - 1 if self.predicted and self.measured else None
        )


@dataclass(frozen=True)
class Expectation:
    """One line of the recipe's `[expect]`, and whether it held."""

    name: str
    outcome: Outcome
    message: str


@dataclass(frozen=True)
class ReportData:
    """One run as data.

    world: kind, size and axes. seconds: wall time by stage, on rank 0. start_seconds: from the start of the run to the
    end of the first step on the slowest rank, without starting new processes; None on a fake world. schedule: do the
    ranks' collectives agree. pipeline: verdicts on the whole list of passes, such as numerics against eager.
    saved_bytes: handed from forward to backward on rank 0. training: rank 0's, with losses averaged over ranks; None
    on a fake world. profile: one step's kernels on rank 0's GPU; None elsewhere. peak: rank 0's. not_run: why no pass's
    graphs were compared and timed; "" where they were. command: what to type for the same run, where a command line
    started it.
    """

    recipe: Recipe
    world: dict[str, Any]
    level: str
    machine: dict[str, Any]
    versions: dict[str, str]
    seconds: dict[str, float]
    passes: list[PassRow]
    schedule: Verdict
    pipeline: list[Verdict]
    roofline: Roofline
    saved_bytes: int
    training: Training | None = None
    profile: StepProfile | None = None
    expectations: list[Expectation] = field(default_factory=list)
    command: str = ""
    start_seconds: float | None = None
    peak: Peak | None = None
    not_run: str = ""

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, the first left out where there are others."""
        return median_step(self.training)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        if self.training is None or not self.step_seconds:
            return None
        return self.training.tokens_per_step / self.step_seconds

    @property
    def idle(self) -> list[tuple[str, str]]:
        """(pass, reason) for passes without effect that the recipe does not allow to have none."""
        return [(r.name, v.message) for r in self.passes if not r.allowed_idle
                for v in r.verdicts if v.outcome is Outcome.NO_EFFECT]

    @property
    def problems(self) -> list[str]:
        """Why the run is not ok, a sentence each: verdicts that fail, expectations missed, no effect where strict."""
        found = [
            f"{r.name}: {v}" for r in self.passes for v in r.verdicts if v.outcome is Outcome.FAIL
        ]
        found += [
            f"all passes: {v}" for v in [self.schedule, *self.pipeline] if v.outcome is Outcome.FAIL
        ]
        found += [
            f"expected {e.name}: {e.message}"
            for e in self.expectations
            if e.outcome is Outcome.FAIL
        ]
        if self.recipe.strict:
            found += [
                f"{name}: NO_EFFECT, and the recipe is strict ({why})" for name, why in self.idle
            ]
        return found

    @property
    def ok(self) -> bool:
        return not self.problems

    def pass_row(self, name: str) -> PassRow:
        """The row of that pass; KeyError if it was not in the list."""
        return {row.name: row for row in self.passes}[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        data = {f: getattr(self, f) for f in ("command", "world", "level", "machine", "versions", "seconds",
                                             "start_seconds", "saved_bytes")}
        rows = [{**asdict(row), "outcome": row.outcome} for row in self.passes]
        return {
            "format_version": FORMAT_VERSION,
            "ok": self.ok,
            "problems": self.problems,
            "recipe": self.recipe.to_dict(),
            **data,
            "passes": rows,
            "schedule": self.schedule.to_json(),
            "pipeline": [v.to_json() for v in self.pipeline],
            "roofline": asdict(self.roofline),
            "training": asdict(self.training) if self.training else None,
            "profile": asdict(self.profile) if self.profile else None,
            "peak": asdict(self.peak) if self.peak else None,
            "not_run": self.not_run,
            "median_step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "expectations": [asdict(e) for e in self.expectations],
        }

    def to_json(self, path: Path | str | None = None) -> str:
        """The report as JSON text, also written to `path` if given."""
        text = json_text(self.to_dict())
        if path is not None:
            write_whole(path, text)
        return text

    def __repr__(self) -> str:
        rows = ", ".join(f"{r.name} {r.outcome}" for r in self.passes) or "no passes"
        return (
            f"Report({self.recipe.name} on {self.world['size']} {self.world['kind']} ranks: {rows})"
        )


def median_step(training: Training | None) -> float | None:
    """Median seconds of a step, the first left out where there are others: it warms up."""
    if training is None or not training.step_seconds:
        return None
    return statistics.median(training.step_seconds[1:] or training.step_seconds)
