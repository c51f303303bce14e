"""Report: what one run of a recipe did, proved and measured; as data, as text for a terminal, and as HTML."""

from __future__ import annotations

import html
import statistics
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.checks.record import PassRecord
from workbench.checks.verdicts import FILLS, SEVERITY, Outcome, Verdict, columns, verdict_of, worst
from workbench.graph.facts import reading
from workbench.graph.read.peak import StepPeak, estimated_bytes
from workbench.pipeline.report_text import memory_changes, painted, said, unchecked, verdict_grid
from workbench.pipeline.roofline import Roofline
from workbench.pipeline.step_profile import StepProfile
from workbench.pipeline.train import Training
from workbench.recipe.contracts import Numerics, Stage
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import counted, json_text, mesh_text

FORMAT_VERSION = 2
WIDTH = 100
GIB = 2**30


@dataclass(frozen=True)
class PassRow:
    """One pass: what it promised, what it took (seconds of wall time) and its verdicts, at most one for each check.

    memory: estimated bytes before and after the pass, by name; None where there was no graph.
    """

    name: str
    stage: Stage
    numerics: Numerics
    tolerance: float | None
    seconds: float
    verify_seconds: float
    verdicts: list[Verdict]
    memory: tuple[dict[str, int], dict[str, int]] | None = None

    @classmethod
    def of(cls, record: PassRecord) -> PassRow:
        # reading the verdicts counts as verification
        contract, verdicts = record.item.contract, record.verdicts
        return cls(record.name, record.stage, contract.numerics, contract.tolerance, record.seconds,
                   record.verify_seconds, verdicts, memory_of(record))

    @property
    def outcome(self) -> Outcome:
        return worst(self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The verdict of that check; None where it has none."""
        return verdict_of(self.verdicts, check)


def memory_of(record: PassRecord) -> tuple[dict[str, int], dict[str, int]] | None:
    """Estimated bytes before and after the pass, see `estimated_bytes`; None where there is no graph to read."""
    if not record.has_graphs or record.malformed:
        return None
    return reading(estimated_bytes, *record.before), reading(estimated_bytes, *record.after)


@dataclass(frozen=True)
class Peak:
    """The step's peak memory on one rank: as the graphs predict it, and the bytes that CUDA's allocator has measured.

    predicted: None for a step without graphs, as an artifact runs it. measured: None on a CPU.
    """

    predicted: StepPeak | None
    measured: int | None

    def lines(self) -> list[str]:
        """Both, with what holds the memory where both are known."""
        texts = [f"{self.measured / GIB:.2f} GiB measured on rank 0"] if self.measured else []
        if self.predicted is not None:
            too_high = (
                f" ({self.predicted.bytes / self.measured - 1:+.1%})" if self.measured else ""
            )
            texts.append(
                f"{self.predicted.bytes / GIB:.2f} GiB predicted, in the {self.predicted.phase}{too_high}"
            )
        lines = [f"peak memory: {', '.join(texts)}"] if texts else []
        if len(texts) == 2 and self.predicted is not None:
            lines += [
                f"  {size / GIB:8.3f} GiB  {name}  {where}"
                for name, size, where in self.predicted.holders
            ]
        return lines


@dataclass(frozen=True)
class Expectation:
    """One line of the recipe's `[expect]`, and whether it held."""

    name: str
    outcome: Outcome
    message: str


@dataclass(frozen=True, repr=False)
class Report:
    """What `run` returns. Shown as a table in a notebook, by `table()` as text, by `to_json()` as data.

    world: kind, size and axes. seconds: wall time by stage, on rank 0. schedule: do the ranks' collectives agree.
    pipeline: verdicts on the whole list of passes, such as numerics against eager.
    saved_bytes: handed from forward to backward on rank 0. training: rank 0's, with losses averaged over ranks; None
    on a fake world. profile: one step's kernels on rank 0's GPU; None elsewhere. peak: rank 0's. not_run: why no pass's
    graphs were compared; "" where they were. command: what to type for the same run, where a command line
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
    peak: Peak | None = None
    not_run: str = ""

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step, the first left out where there are others: it warms up."""
        if self.training is None or not self.training.step_seconds:
            return None
        return statistics.median(self.training.step_seconds[1:] or self.training.step_seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        if self.training is None or not self.step_seconds:
            return None
        return self.training.tokens_per_step / self.step_seconds

    @property
    def idle(self) -> list[tuple[str, str]]:
        """(pass, reason) for passes without effect that the recipe does not allow to have none."""
        return [
            (row.name, verdict.message)
            for row in self.passes
            if row.name not in self.recipe.expect.no_effect
            for verdict in row.verdicts
            if verdict.outcome is Outcome.NO_EFFECT
        ]

    @property
    def whole_step(self) -> list[Verdict]:
        """The verdicts that say something of the whole step: of each check the gravest."""
        gravest = {"collectives": self.schedule}
        for verdict in sorted(self.pipeline, key=lambda verdict: SEVERITY.index(verdict.outcome)):
            if verdict.check in ("order", "numerics"):
                gravest.setdefault(verdict.check, verdict)
        return list(gravest.values())

    @property
    def named_verdicts(self) -> list[tuple[str, list[Verdict]]]:
        """(name, verdicts) of each pass, and of the whole list."""
        return [
            *((row.name, row.verdicts) for row in self.passes),
            ("whole step", [self.schedule, *self.pipeline]),
        ]

    @property
    def unchecked(self) -> dict[str, list[str]]:
        """Each reason why something was not checked, and the checks it stands for."""
        return unchecked(
            [row.verdicts for row in self.passes], [self.schedule, *self.pipeline], self.not_run
        )

    @property
    def problems(self) -> list[str]:
        """Why the run is not ok, a sentence each: verdicts that fail, expectations missed, no effect where strict."""
        verdicts = [(row.name, verdict) for row in self.passes for verdict in row.verdicts]
        verdicts += [("all passes", verdict) for verdict in (self.schedule, *self.pipeline)]
        problems = [
            f"{name}: {verdict}" for name, verdict in verdicts if verdict.outcome is Outcome.FAIL
        ]
        problems += [
            f"expected {e.name}: {e.message}"
            for e in self.expectations
            if e.outcome is Outcome.FAIL
        ]
        if self.recipe.strict:
            problems += [
                f"{name}: NO_EFFECT, and the recipe is strict ({why})" for name, why in self.idle
            ]
        return problems

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def outcome(self) -> tuple[str, Outcome]:
        """The last word, and its colour: PASS, or FAIL and how many problems."""
        if not self.ok:
            return f"FAIL: {counted(len(self.problems), 'problem')}", Outcome.FAIL
        proved = verdict_of(self.pipeline, "numerics")
        checked = proved is not None and proved.outcome is Outcome.PASS
        unproved = "" if checked else " (numerics not checked)"
        if self.idle:
            return f"PASS, with {len(self.idle)} NO_EFFECT{unproved}", Outcome.NO_EFFECT
        return f"PASS{unproved}", Outcome.PASS

    def pass_row(self, name: str) -> PassRow:
        """The row of that pass; KeyError if it was not in the list."""
        return {row.name: row for row in self.passes}[name]

    def to_json(self, path: Path | str | None = None) -> str:
        """The report as JSON text, also written to `path` if given."""
        text = json_text(asdict(self) | {
            "format_version": FORMAT_VERSION,
            "ok": self.ok,
            "problems": self.problems,
            "recipe": self.recipe.to_dict(),
            "passes": [asdict(row) | {"outcome": row.outcome} for row in self.passes],
            "median_step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
        })
        if path is not None:
            write_whole(path, text)
        return text

    def table(self, *, reasoned: bool = True, color: bool = False) -> str:
        """The verdicts as text: a row a pass, a column a check, and, if `reasoned`, the reasons underneath."""
        passes = [(row.name, row.verdicts) for row in self.passes]
        lines = [
            self._title(),
            "",
            *verdict_grid([*passes, ("whole step", self.whole_step)], color=color),
        ]
        lines += [*self._reasons(color), ""] if reasoned else [""]
        expected = [f"expected {e.name}: {e.outcome}, {e.message}" for e in self.expectations]
        figures = []
        for row in self.passes:
            if reasoned and (changes := memory_changes(row.memory)):
                figures.append(f"{row.name}: {'; '.join(changes)}")
        for line in (*self._lossy(), *expected, *figures, *self._figures()):
            lines += _wrapped(line, "", "  ")
        for problem in self.problems:
            wrapped = _wrapped(problem, "! ", "  ")
            lines += [painted(line, Outcome.FAIL, color) for line in wrapped]
        return "\n".join([*lines, painted(*self.outcome, color)])

    def __str__(self) -> str:
        return self.table()

    def _title(self) -> str:
        ranks = counted(self.world["size"], f"{self.world['kind']} rank")
        return (
            f"{self.recipe.name} on {ranks} ({mesh_text(self.world['axes'])}), level {self.level}"
        )

    def _reasons(self, color: bool) -> list[str]:
        lines = []
        for name, verdicts in self.named_verdicts:
            telling = [
                verdict
                for verdict in verdicts
                if verdict.outcome is not Outcome.UNKNOWN and said(verdict)
            ]
            lines += ["", name] if telling else []
            for verdict in telling:
                good = verdict.outcome is Outcome.PASS
                text = said(verdict) if good else f"{verdict.outcome}: {said(verdict)}"
                wrapped = _wrapped(text, f"  {verdict.check:<12}", " " * 14)
                lines += [painted(line, verdict.outcome, color and not good) for line in wrapped]
        lines += ["", "not checked"] if self.unchecked else []
        for why, checks in self.unchecked.items():
            lines += _wrapped(f"{', '.join(checks)}: {why}", "  ", "    ")
        return lines

    def _lossy(self) -> list[str]:
        """Each LOSSY pass with its tolerance, told once."""
        return [
            f"{row.name} is LOSSY: norm-relative tolerance {row.tolerance:g} on the loss and each gradient"
            for row in self.passes
            if row.tolerance is not None
        ]

    def _figures(self) -> list[str]:
        """What was measured, one line each."""
        roof, training, step = self.roofline, self.training, self.step_seconds
        lines = [f"saved for the backward: {self.saved_bytes:,} bytes a rank"]
        if not roof.flop_per_token:
            return lines
        lines.append(f"model: {_si(roof.flop_per_token)}FLOP a token")
        if roof.ceiling is None or training is None or step is None:
            return [*lines, roof.reason]
        lines[-1] += f"; matmul ceiling {_si(roof.ceiling)}FLOP/s on all ranks in {roof.dtype}"
        lines.append(
            f"step: {step * 1e3:,.1f} ms (median), {self.tokens_per_second or 0:,.0f} tokens/s; "
            f"roofline {(roof.step_seconds or 0) * 1e3:,.2f} ms, {roof.fraction or 0:.1%} of it reached"
        )
        losses, norms = training.losses, training.norms
        resumed = f" after the {training.first_step} of a checkpoint" if training.first_step else ""
        lines.append(f"loss: {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps{resumed}; "
                     f"gradient norm {norms[0]:.3f} to {norms[-1]:.3f}")
        if warning := training.warning():
            lines.append(f"warning: {warning}")
        if training.load is not None:
            lines.append(f"experts: {training.load.summary()}")
        lines += self.peak.lines() if self.peak is not None else []
        if self.profile is not None:
            lines.append(f"one step on rank 0's GPU: {self.profile}")
        return lines

    def _repr_html_(self) -> str:
        """The same table for a notebook; a cell's reason shows under the pointer, and in the list underneath."""
        escape = html.escape
        checks = columns(
            [*self.pipeline, *(verdict for row in self.passes for verdict in row.verdicts)]
        )
        head = "".join(f"<th style='text-align:left'>{check}</th>" for check in checks)
        rows = [
            (f"<code>{escape(row.name)}</code>", row.verdicts, "<td>-</td>") for row in self.passes
        ]
        body = ""
        for name, verdicts, missing in (*rows, ("whole step", self.whole_step, "<td></td>")):
            cells = {verdict.check: _cell(verdict) for verdict in verdicts}
            line = "".join(cells.get(check, missing) for check in checks)
            body += f"<tr><td style='text-align:left'>{name}</td>{line}</tr>"
        listed = ""
        for name, verdicts in self.named_verdicts:
            facts = [escape(f"{verdict.check}: {_fact(verdict)}") for verdict in verdicts
                     if verdict.outcome is not Outcome.UNKNOWN and _fact(verdict)]
            listed += f"<li><code>{escape(name)}</code>: {'; '.join(facts)}</li>" if facts else ""
        for why, names in self.unchecked.items():
            listed += f"<li>{escape(', '.join(names))}: UNKNOWN, {escape(why)}</li>"
        text, outcome = self.outcome
        expected = [f"expected {e.name}: {e.outcome}" for e in self.expectations]
        lines = "".join(
            f"<div>{escape(line)}</div>" for line in (*self._lossy(), *expected, *self.problems)
        )
        return (
            f"<b>{escape(self._title())}</b>"
            f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{lines}"
            f"<div><b style='background:{FILLS[outcome]};color:#222;padding:0 .4em'>{escape(text)}</b></div>"
            f"<details><summary>what was found</summary><ul>{listed}</ul></details>"
        )

    def page(self) -> str:
        """The same and its figures as a page, which a browser opens without a kernel and a network."""
        escape = html.escape
        figures = escape("\n".join(self._figures()))
        recipe = escape(self.recipe.to_toml())
        return (
            f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{escape(self._title())}</title>'
            "<style>:root { color-scheme: light dark } body { font: 16px/1.5 sans-serif; margin: 2em }</style>"
            f"<p><code>{escape(self.command)}</code></p>{self._repr_html_()}<pre>{figures}</pre>"
            f"<details><summary>the recipe</summary><pre>{recipe}</pre></details></html>\n"
        )

    def __repr__(self) -> str:
        rows = ", ".join(f"{row.name} {row.outcome}" for row in self.passes) or "no passes"
        return (
            f"Report({self.recipe.name} on {self.world['size']} {self.world['kind']} ranks: {rows})"
        )


def _si(value: float) -> str:
    for bound, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:.3g} {unit}"
    return f"{value:.3g} "


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )


def _fact(verdict: Verdict) -> str:
    """What the verdict says, without figures that differ from run to run: a committed notebook is compared."""
    return "" if verdict.outcome is Outcome.PASS and verdict.check == "numerics" else said(verdict)


def _cell(verdict: Verdict) -> str:
    return (f"<td style='text-align:left;background:{FILLS[verdict.outcome]};color:#222' "
            f"title='{html.escape(_fact(verdict), quote=True)}'>{verdict.outcome}</td>")
