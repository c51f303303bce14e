"""One variant of a recipe in figures and verdicts, and the difference between two variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.checks.collectives import collectives_of, moved_bytes
from workbench.checks.verdicts import Outcome, Verdict, worst
from workbench.graph.facts import reading
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.cost import device_spec
from workbench.graph.read.peak import estimated_bytes
from workbench.graph.read.simulated_run import simulated
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import aligned

CHANGED = "#c9dff0"


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
        rows: dict[str, int | float] = {f"launches: {name}": n for name, n in self.launches.items()}
        rows |= {f"bytes: {name}": n for name, n in self.bytes.items()}
        rows |= {f"estimated peak of the {name}, bytes": n for name, n in self.peaks.items()}
        rows["estimated saved, bytes"] = self.saved
        where = f"on {self.device}, simulated ms, {device_spec(self.device).trust}"
        return rows | {f"step {where}": self.step_ms, f"compute {where}": self.compute_ms,
                       f"exposed {where}": self.exposed_ms}


def figures_of(pair: ForwardBackward, device: str, *, compiled: bool = False) -> Figures:
    """The figures of a pair. compiled: a compiler has lowered its graphs. WorkbenchError for an unknown device."""
    moved, launched = moved_bytes(collectives_of(pair.graphs))
    names = {" ".join(filter(None, key)): key for key in sorted(launched)}
    launches = {name: launched[key] for name, key in names.items()}
    sizes = {name: moved[key] for name, key in names.items()}
    estimate = reading(estimated_bytes, *pair.graphs)
    peaks = {part: estimate[f"peak_{part}"] for part in pair.by_part}
    run = simulated(pair.by_part, device, fused=compiled)
    return Figures(
        launches,
        sizes,
        peaks,
        estimate["saved"],
        device,
        run.total_ms,
        run.compute_ms,
        run.exposed_ms,
    )


@dataclass(frozen=True)
class Variant:
    """A recipe and its results. verdicts: by pass, in order. schedule: whether the ranks' collectives agree."""

    recipe: Recipe
    verdicts: Mapping[str, Sequence[Verdict]]
    schedule: Verdict
    figures: Figures

    @property
    def outcome(self) -> Outcome:
        """The gravest of all verdicts."""
        return worst(verdict for verdicts in self.verdicts.values() for verdict in verdicts)

    def named(self) -> dict[str, Verdict]:
        """Each verdict by "PASS: CHECK", and on the collectives of all ranks."""
        verdicts = {
            f"{name}: {v.check}": v for name, verdicts in self.verdicts.items() for v in verdicts
        }
        return verdicts | {"ranks agree": self.schedule}


@dataclass(frozen=True, repr=False)
class Difference:
    """The difference between two variants. seconds: wall time of the whole answer.

    changes: key, value before, value after. ran: the stages that ran again, in order, with the seconds of each. kept:
    those that did not.
    """

    changes: Sequence[tuple[str, Any, Any]]
    before: Variant
    after: Variant
    ran: Mapping[str, float]
    kept: Sequence[str]
    seconds: float
    reverted: bool = False

    @property
    def title(self) -> str:
        changes = ", ".join(f"{key}: {_short(a)} -> {_short(b)}" for key, a, b in self.changes)
        return (
            f"{'reverted' if self.reverted else 'what if'}: {changes or 'nothing but code differs'}"
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(name, before, after, change) of each verdict and figure; change is "" where both are the same."""
        rows = []
        old, new = self.before.named(), self.after.named()
        for name in old | new:
            a, b = (str(side[name].outcome) if name in side else "-" for side in (old, new))
            rows.append((name, a, b, "" if a == b else "differs"))
        was, now = self.before.figures.rows(), self.after.figures.rows()
        for name in was | now:
            x, y = was.get(name, 0), now.get(name, 0)
            rows.append((name, number(x), number(y), "" if x == y else number(y - x, "+")))
        return rows

    def pictured(self) -> Any:
        """`draw.difference`: a row for each verdict and figure, filled where it changed.

        Below: which stages ran again, and what failed.
        """
        from workbench.notebook.draw.picture import Table
        from workbench.notebook.draw.verdicts import failures

        rows = tuple(self.rows())
        fills = {(i, 3): CHANGED for i, row in enumerate(rows) if row[3]}
        notes = [
            f"ran again: {', '.join(self.ran) or 'nothing'}",
            f"kept: {', '.join(self.kept) or 'nothing'}",
        ]
        for when, side in (("before", self.before), ("after", self.after)):
            for name, verdicts in side.verdicts.items():
                notes += failures(f"{when}, {name}", verdicts)
        return Table(self.title, ("", "before", "after", "change"), rows, fills, tuple(notes))

    def __repr__(self) -> str:
        ran = (
            ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.ran.items()) or "nothing"
        )
        lines = [self.title, f"ran again: {ran}", f"kept: {', '.join(self.kept) or 'nothing'}",
                 f"answered in {self.seconds:.2f} s",
                 *aligned([("", "before", "after", "change"), *self.rows()], range(1, 4))]
        for side, variant in (("before", self.before), ("after", self.after)):
            lines += [
                f"{side}, {name}: {verdict.outcome}, {verdict.message}"
                for name, verdict in variant.named().items()
                if verdict.outcome is not Outcome.PASS
            ]
        return "\n".join(lines)


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(value: float, sign: str = "") -> str:
    """A figure of `Figures`: whole numbers with commas, milliseconds with three digits; `sign` "+" signs both."""
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign},.3f}"
