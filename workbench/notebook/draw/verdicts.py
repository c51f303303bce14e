"""The verdicts of a list of passes as a table: a row for each pass, a column for each check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.checks.verdicts import FILLS, Outcome, Verdict, columns
from workbench.notebook.draw.picture import Table
from workbench.pipeline.report_text import outcomes
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted


def verdicts(records: Sequence[PassRecord]) -> Table:
    """The verdicts of each pass by what is known now; - where a check did not run. Reasons are listed below."""
    by_pass = [(record.name, record.verdicts) for record in records]
    checks = columns(verdict for _, verdicts in by_pass for verdict in verdicts)
    rows, notes = [], []
    fills: dict[tuple[int, int], str] = {}
    for i, (name, verdicts) in enumerate(by_pass):
        by_check = outcomes(verdicts, checks)
        rows.append((name, *(cell(outcome) for outcome in by_check)))
        fills |= {(i, j): FILLS[outcome] for j, outcome in enumerate(by_check, 1) if outcome}
        notes += failures(name, verdicts)
    return Table(counted(len(rows), "pass"), ("pass", *checks), tuple(rows), fills, tuple(notes))


def cell(outcome: Outcome | None) -> str:
    """The text of an outcome; of none, a dash."""
    return "-" if outcome is None else str(outcome)


def failures(name: str, verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each verdict that fails or found no effect; `name` comes first."""
    return [f"{name}: {v.check}: {v.outcome}, {v.message}" for v in verdicts
            if v.outcome in (Outcome.FAIL, Outcome.NO_EFFECT)]
