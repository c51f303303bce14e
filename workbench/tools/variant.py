"""One variant of a recipe in figures and verdicts, and the difference between two variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.authoring.plans import ParallelPlan
from workbench.checks.collectives import collectives_of, moved_bytes
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict, worst
from workbench.graph.facts import reading
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.cost import device_spec
from workbench.graph.read.peak import estimated_bytes
from workbench.graph.read.simulated_run import simulated
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import aligned


@dataclass(frozen=True)
class Figures:
    """What one rank's forward and backward would take.

    launches, bytes: of collectives, by kind, mesh axis and reduction; bytes of the unsharded side. peaks: estimated
    bytes of the forward and of the backward, in node order. saved: bytes that the forward saves for the backward.
    step_ms, compute_ms and exposed_ms: simulated on `device`, forward and backward together.
    """

    launches: Mapping[str, int]
    bytes: Mapping[str, int]
    peaks: Mapping[str, int]
    saved: int
    device: str
    step_ms: float
    compute_ms: float
    exposed_ms: float

    def rows(self) -> dict[str, int | float]:
        """The figures by name, with the unit in the name."""
        found: dict[str, int | float] = {
            f"launches: {name}": n for name, n in self.launches.items()
        }
        found |= {f"bytes: {name}": n for name, n in self.bytes.items()}
        found |= {f"estimated peak of the {name}, bytes": n for name, n in self.peaks.items()}
        found["estimated saved, bytes"] = self.saved
        for name, ms in (
            ("step", self.step_ms),
            ("compute", self.compute_ms),
            ("exposed", self.exposed_ms),
        ):
            found[f"{name} on {self.device}, simulated ms, {device_spec(self.device).trust}"] = ms
        return found


def figures_of(pair: ForwardBackward, device: str, *, compiled: bool = False) -> Figures:
    """The figures of a pair. compiled: a compiler has lowered its graphs. WorkbenchError for an unknown device."""
    moved, launched = moved_bytes(collectives_of(pair.graphs))
    names = {key: " ".join(filter(None, key)) for key in sorted(launched)}
    estimate = reading(estimated_bytes, *pair.graphs)
    run = simulated(pair.by_part, device, fused=compiled)
    return Figures({name: launched[key] for key, name in names.items()}, {name: moved[key] for key, name in
                   names.items()}, {part: estimate[f"peak_{part}"] for part in pair.by_part}, estimate["saved"],
                   device, run.total_ms, run.compute_ms, run.exposed_ms)


@dataclass(frozen=True)
class Variant:
    """A recipe and its results. verdicts: by pass, in order. schedule: whether the ranks' collectives agree."""

    recipe: Recipe
    plan: ParallelPlan | None
    verdicts: Mapping[str, Sequence[Verdict]]
    schedule: Verdict
    figures: Figures

    @property
    def outcome(self) -> Outcome:
        """The gravest of all verdicts."""
        return worst(verdict for found in self.verdicts.values() for verdict in found)

    def rows(self) -> dict[str, str]:
        """The outcome of each check of each pass."""
        found = {
            f"{name}: {v.check}": str(v.outcome)
            for name, each in self.verdicts.items()
            for v in each
        }
        return found | {"ranks agree": str(self.schedule.outcome)}

    def reasons(self) -> dict[str, str]:
        """The reason for each check that did not pass."""
        return {
            f"{name}: {v.check}": f"{v.outcome}, {v.message}"
            for name, each in self.verdicts.items()
            for v in each
            if v.outcome is not Outcome.PASS
        }


def verdicts_of(records: Sequence[PassRecord]) -> dict[str, tuple[Verdict, ...]]:
    """By pass, its verdicts."""
    return {record.name: tuple(record.verdicts) for record in records}


@dataclass(frozen=True)
class Ran:
    """A stage that ran, with its wall time. why: what differs from the previous variant, or the stage that ran before.
    """

    stage: str
    seconds: float
    why: str

    def __str__(self) -> str:
        return f"{self.stage} {self.seconds:.2f} s ({self.why})"


@dataclass(frozen=True, repr=False)
class Difference:
    """The difference between two variants. seconds: wall time of the whole answer.

    changes: key, value before, value after. ran: the stages that ran again, in order. kept: those that did not.
    """

    changes: Sequence[tuple[str, Any, Any]]
    before: Variant
    after: Variant
    ran: Sequence[Ran]
    kept: Sequence[str]
    seconds: float
    reverted: bool = field(default=False)

    @property
    def title(self) -> str:
        listed = ", ".join(f"{key}: {_short(a)} -> {_short(b)}" for key, a, b in self.changes)
        return (
            "reverted" if self.reverted else "what if"
        ) + f": {listed or 'nothing but code differs'}"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(name, before, after, change) of each verdict and figure; change is "" where both are the same."""
        found = []
        old, new = self.before.rows(), self.after.rows()
        for name in old | new:
            a, b = old.get(name, "-"), new.get(name, "-")
            found.append((name, a, b, "" if a == b else "differs"))
        was, now = self.before.figures.rows(), self.after.figures.rows()
        for name in was | now:
            x, y = was.get(name, 0), now.get(name, 0)
            found.append((name, number(x), number(y), "" if x == y else number(y - x, "+")))
        return found

    def __repr__(self) -> str:
        ran = ", ".join(map(str, self.ran)) or "nothing"
        lines = [self.title, f"ran again: {ran}", f"kept: {', '.join(self.kept) or 'nothing'}",
                 f"answered in {self.seconds:.2f} s",
                 *aligned([("", "before", "after", "change"), *self.rows()], range(1, 4))]
        for side, reasons in (("before", self.before.reasons()), ("after", self.after.reasons())):
            lines += [f"{side}, {name}: {why}" for name, why in reasons.items()]
        return "\n".join(lines)


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(value: float, sign: str = "") -> str:
    """A figure of `Figures`: whole numbers with commas, milliseconds with three digits; `sign` "+" signs both."""
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign},.3f}"
