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
    found = [(record.name, record.verdicts) for record in records]
    checks = columns(verdict for _, verdicts in found for verdict in verdicts)
    cells = [
        (name, [cell(outcome) for outcome in outcomes(verdicts, checks)])
        for name, verdicts in found
    ]
    notes = [line for name, verdicts in found for line in failures(name, verdicts)]
    return grid(counted(len(found), "pass"), checks, cells, notes)


def cell(outcome: Outcome | None) -> tuple[str, str]:
    """Text and background of an outcome; of none, a dash."""
    return ("-", "") if outcome is None else (str(outcome), FILLS[outcome])


def failures(name: str, verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each verdict that fails or found no effect; `name` comes first."""
    return [f"{name}: {v.check}: {v.outcome}, {v.message}" for v in verdicts
            if v.outcome in (Outcome.FAIL, Outcome.NO_EFFECT)]


def grid(title: str, checks: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
         notes: Iterable[str]) -> Table:
    """A row for each pass and a column for each check, from (text, background or "") for each cell."""
    fills = {
        (i, j): fill
        for i, (_, cells) in enumerate(rows)
        for j, (_, fill) in enumerate(cells, 1)
        if fill
    }
    texts = tuple((name, *(text for text, _ in cells)) for name, cells in rows)
    return Table(title, ("pass", *checks), texts, fills, tuple(notes))
