"""A report as text for a terminal and as HTML for a notebook: a row a pass, a column a check, reasons underneath."""

from __future__ import annotations

import html as markup
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from workbench.checks.verdicts import FILLS, SEVERITY, Outcome, Verdict, columns
from workbench.pipeline.report_data import ReportData
from workbench.recipe.wording import aligned, counted, mesh_text

_COLORS = {Outcome.PASS: "32", Outcome.FAIL: "1;31", Outcome.NO_EFFECT: "33", Outcome.UNKNOWN: "2"}
_OUTCOME = re.compile(rf"\b({'|'.join(Outcome)})\b")
_OF_PASSES = ("lint", "effect")
"""Checks that say nothing of the whole step."""
NO_GRAPH = "compiled callables, and no graph to look at"


def _painted(text: str, outcome: Outcome, color: bool) -> str:
    return f"\033[{_COLORS[outcome]}m{text}\033[0m" if color else text


def title(report: ReportData) -> str:
    size = report.world["size"]
    who = counted(size, f"{report.world['kind']} rank")
    return (
        f"{report.recipe.name} on {who} ({mesh_text(report.world['axes'])}), level {report.level}"
    )


def heads(report: ReportData) -> tuple[str, ...]:
    """The columns of its table."""
    return columns([*report.pipeline, *(v for row in report.passes for v in row.verdicts)])


def whole_step(report: ReportData) -> dict[str, Verdict]:
    """The verdicts on the whole list of passes, by check."""
    found = {"collectives": report.schedule}
    for verdict in report.pipeline:
        known = found.get(verdict.check, verdict)
        if verdict.check not in _OF_PASSES and verdict.check != "collectives":
            found[verdict.check] = min(known, verdict, key=lambda v: SEVERITY.index(v.outcome))
    return found


def rows(report: ReportData) -> list[tuple[str, list[Outcome | None]]]:
    """(name, an outcome for each check) of each pass, and of the whole list; None where a check does not apply."""
    found: list[tuple[str, list[Outcome | None]]] = [
        (r.name, outcomes(r.verdicts, heads(report))) for r in report.passes]
    whole = whole_step(report)
    return [
        *found,
        ("whole step", [whole[c].outcome if c in whole else None for c in heads(report)]),
    ]


def outcomes(verdicts: Sequence[Verdict], checks: Sequence[str]) -> list[Outcome | None]:
    """The outcome of each check; None where it has no verdict."""
    found = {v.check: v.outcome for v in verdicts}
    return [found.get(check) for check in checks]


def reasons(report: ReportData) -> list[tuple[str, list[Verdict]]]:
    """(name, verdicts) that say something: what passed and what did not; for the unchecked see `unchecked`."""
    found = [(r.name, r.verdicts) for r in report.passes] + [
        ("whole step", [report.schedule, *report.pipeline])
    ]
    return [
        (name, [v for v in verdicts if v.outcome is not Outcome.UNKNOWN and said(v)])
        for name, verdicts in found
    ]


def said(verdict: Verdict) -> str:
    """The message, or what figures the evidence holds."""
    if verdict.message:
        return verdict.message
    return "; ".join(
        filter(None, (_figure(k.replace("_", " "), v) for k, v in verdict.evidence.items()))
    )


def _figure(name: str, value: Any) -> str:
    """One entry of the evidence in a few words: long tables as their total, lists as their length."""
    if isinstance(value, dict) and value and all(isinstance(v, int) for v in value.values()):
        if len(value) > 3:
            return f"{name} {sum(value.values()):,}"
        return f"{name} " + ", ".join(f"{str(k).replace('_', ' ')} {v:,}" for k, v in value.items())
    if isinstance(value, list):
        few = len(value) <= 3 and all(isinstance(v, int) for v in value)
        return f"{name} " + (
            ", ".join(f"{v:,}" for v in value) if few and value else str(len(value))
        )
    if isinstance(value, int):
        return f"{name} {value:,}"
    return f"{name} {value}" if isinstance(value, float | str) else ""


def unchecked(
    passes: Sequence[Sequence[Verdict]], others: Sequence[Verdict], not_run: str
) -> dict[str, list[str]]:
    """Each reason why something was not checked, and the checks it stands for.

    passes: the verdicts of each pass. not_run: why no graph was run, or "".
    """
    reasons = [
        (v.message, v.check)
        for each in (*passes, others)
        for v in each
        if v.outcome is Outcome.UNKNOWN
    ]
    for verdicts in passes:
        checks = {v.check for v in verdicts}
        reasons += [(NO_GRAPH, check) for check in ("lint", "collectives") if check not in checks]
        if not_run and "numerics" not in checks:
            reasons.append((not_run, "numerics"))
    found: dict[str, list[str]] = {}
    for why, check in dict.fromkeys(reasons):
        found.setdefault(why, []).append(check)
    return found


def pass_figures(report: ReportData) -> list[str]:
    """Estimated memory and measured time of each pass's graphs, where they changed or were measured."""
    lines = []
    for row in report.passes:
        told = memory_changes(row.memory)
        if row.ran_for is not None:
            before, after = row.ran_for
            told.append(f"runs {before * 1e3:,.1f} ms before, {after * 1e3:,.1f} ms after")
        lines += [f"{row.name}: {'; '.join(told)}"] if told else []
    return lines


def memory_changes(memory: tuple[dict[str, int], dict[str, int]] | None) -> list[str]:
    """Each estimate that a pass changed, in bytes."""
    if memory is None:
        return []
    was, now = memory
    return [f"{key.replace('_', ' of the ')} {was[key]:,} to {now[key]:,} bytes (estimated)"
            for key in was if key in now and was[key] != now[key]]


def peak_lines(report: ReportData) -> list[str]:
    """The step's peak memory, predicted and measured, with what holds it."""
    peak, gib = report.peak, 2**30
    if peak is None or (peak.predicted is None and peak.measured is None):
        return []
    told = (
        [f"{peak.measured / gib:.2f} GiB measured on rank 0"] if peak.measured is not None else []
    )
    if peak.predicted is not None:
        off = f" ({peak.off:+.1%})" if peak.off is not None else ""
        told.append(
            f"{peak.predicted.bytes / gib:.2f} GiB predicted, in the {peak.predicted.phase}{off}"
        )
    lines = [f"peak memory: {', '.join(told)}"]
    if peak.predicted is not None and peak.measured is not None:
        lines += [
            f"  {size / gib:8.3f} GiB  {name}  {where}"
            for name, size, where in peak.predicted.holders
        ]
    return lines


def lossy(report: ReportData) -> list[str]:
    """Each LOSSY pass with its tolerance: told once, where its verdicts are shown."""
    return [
        f"{r.name} is LOSSY: norm-relative tolerance {r.tolerance:g} on the loss and each gradient"
        for r in report.passes
        if r.tolerance is not None
    ]


def figures(report: ReportData) -> list[str]:
    """What was measured, one line each."""
    roof, training, step = report.roofline, report.training, report.step_seconds
    lines = [f"saved for the backward: {report.saved_bytes:,} bytes a rank",
             f"model: {_si(roof.flop_per_token)}FLOP a token"]
    if roof.ceiling is None or training is None or step is None:
        return [*lines, roof.reason]
    lines[-1] += f"; matmul ceiling {_si(roof.ceiling)}FLOP/s on all ranks in {roof.dtype}"
    lines.append(
        f"step: {step * 1e3:,.1f} ms (median), {report.tokens_per_second or 0:,.0f} tokens/s; "
        f"roofline {(roof.step_seconds or 0) * 1e3:,.2f} ms, {roof.fraction or 0:.1%} of it reached"
    )
    losses, resumed = (
        training.losses,
        f" after the {training.first_step} of a checkpoint" * bool(training.first_step),
    )
    lines.append(f"loss: {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps{resumed}; "
                 f"gradient norm {training.norms[0]:.3f} to {training.norms[-1]:.3f}")
    if warning := training.warning():
        lines.append(f"warning: {warning}")
    if training.load is not None:
        lines.append(f"experts: {training.load.summary()}")
    lines += peak_lines(report)
    if report.profile is not None:
        lines.append(f"one step on rank 0's GPU: {report.profile}")
    return lines


def _si(value: float) -> str:
    for bound, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:.3g} {unit}"
    return f"{value:.3g} "


def verdict_line(report: ReportData) -> tuple[str, Outcome]:
    """The last word: PASS, or FAIL and how many problems."""
    if report.ok:
        return ("PASS" if not report.idle else f"PASS, with {len(report.idle)} NO_EFFECT"), (
            Outcome.PASS if not report.idle else Outcome.NO_EFFECT)
    return f"FAIL: {counted(len(report.problems), 'problem')}", Outcome.FAIL


def _wrapped(text: str, width: int, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    ) or [first]


def grid(
    checks: Sequence[str],
    named: Sequence[tuple[str, Sequence[Outcome | None]]],
    *,
    color: bool = False,
) -> list[str]:
    """A line of heads, and a line for each name with its outcome of each check."""
    cells = [[name, *(str(outcome or "-") for outcome in outcomes)] for name, outcomes in named]
    lines = aligned([["", *checks], *cells])
    return [
        _OUTCOME.sub(lambda word: _painted(word[0], Outcome(word[0]), color), line)
        for line in lines
    ]


def table(
    report: ReportData, *, reasoned: bool = True, color: bool = False, width: int = 100
) -> str:
    """See `Report.table`."""
    lines = [title(report), "", *grid(heads(report), rows(report), color=color)]
    for name, verdicts in reasons(report) if reasoned else []:
        if verdicts:
            lines += ["", name]
        for v in verdicts:
            mark = "" if v.outcome is Outcome.PASS else f"{v.outcome}: "
            reason = _wrapped(mark + said(v), width, f"  {v.check:<12}", " " * 14)
            lines += [
                _painted(line, v.outcome, color and v.outcome is not Outcome.PASS)
                for line in reason
            ]
    if reasoned and (missing := _unchecked(report)):
        lines += ["", "not checked"]
        for why, checks in missing.items():
            lines += _wrapped(f"{', '.join(checks)}: {why}", width, "  ", "    ")
    lines.append("")
    expected = [f"expected {e.name}: {e.outcome}, {e.message}" for e in report.expectations]
    for line in [
        *lossy(report),
        *expected,
        *(pass_figures(report) if reasoned else []),
        *figures(report),
    ]:
        lines += _wrapped(line, width, "", "  ")
    lines += [
        _painted(line, Outcome.FAIL, color)
        for p in report.problems
        for line in _wrapped(p, width, "! ", "  ")
    ]
    text, outcome = verdict_line(report)
    return "\n".join([*lines, _painted(text, outcome, color)])


def _unchecked(report: ReportData) -> dict[str, list[str]]:
    return unchecked(
        [row.verdicts for row in report.passes], [report.schedule, *report.pipeline], report.not_run
    )


def html(report: ReportData) -> str:
    """The same table for a notebook; a cell's reason shows under the pointer, and in the list underneath."""
    escape = markup.escape
    head = "".join(f"<th style='text-align:left'>{c}</th>" for c in heads(report))
    body = []
    for row in report.passes:
        cells = [row.verdict(c) for c in heads(report)]
        body.append(f"<tr><td style='text-align:left'><code>{escape(row.name)}</code></td>"
                    + "".join(_cell(v) for v in cells) + "</tr>")
    whole = whole_step(report)
    last = [_cell(whole[c]) if c in whole else "<td></td>" for c in heads(report)]
    body.append("<tr><td style='text-align:left'>whole step</td>" + "".join(last) + "</tr>")
    listed = "".join(
        f"<li><code>{escape(name)}</code>: {'; '.join(escape(f'{v.check}: {_fact(v)}') for v in told)}</li>"
        for name, verdicts in reasons(report)
        if (told := [v for v in verdicts if _fact(v)])
    )
    listed += "".join(f"<li>{escape(', '.join(checks))}: UNKNOWN, {escape(why)}</li>"
                      for why, checks in _unchecked(report).items())
    text, outcome = verdict_line(report)
    lines = [
        *lossy(report),
        *(f"expected {e.name}: {e.outcome}" for e in report.expectations),
        *report.problems,
    ]
    return (
        f"<b>{escape(title(report))}</b>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        + "".join(f"<div>{escape(line)}</div>" for line in lines)
        + f"<div><b style='background:{FILLS[outcome]};color:#222;padding:0 .4em'>{escape(text)}</b></div>"
        f"<details><summary>what was found</summary><ul>{listed}</ul></details>"
    )


def _fact(verdict: Verdict) -> str:
    """What the verdict says, without figures that differ from run to run: a committed notebook is compared."""
    return "" if verdict.outcome is Outcome.PASS and verdict.check == "numerics" else said(verdict)


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "<td>-</td>"
    return (f"<td style='text-align:left;background:{FILLS[verdict.outcome]};color:#222' "
            f"title='{markup.escape(_fact(verdict), quote=True)}'>{verdict.outcome}</td>")
