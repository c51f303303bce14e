"""The verdicts of a list of passes as a table: a row for each pass, a column for each check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.checks.verdicts import FILLS, Outcome, Verdict, columns, worst
from workbench.notebook.draw.picture import Table
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted


def verdicts(records: Sequence[PassRecord]) -> Table:
    """The verdicts of each pass so far; a check that did not run is UNKNOWN. Reasons are listed below."""
    checks = columns(v for r in records for v in r.verdicts)
    rows = [(r.name, [worst(v for v in r.verdicts if v.check == check) for check in checks]) for r in records]
    notes = [line for record in records for line in failures(record.name, record.verdicts)]
    cells = [(name, [(str(outcome), FILLS[outcome]) for outcome in found]) for name, found in rows]
    return grid(counted(len(rows), "pass"), checks, cells, notes)


def failures(name: str, verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each verdict that fails or found no effect; `name` comes first."""
    return [f"{name}: {v.check}: {v.outcome}, {v.message}" for v in verdicts
            if v.outcome in (Outcome.FAIL, Outcome.NO_EFFECT)]


def grid(title: str, checks: Sequence[str], rows: Sequence[tuple[str, Sequence[tuple[str, str]]]],
         notes: Iterable[str]) -> Table:
    """A row for each pass and a column for each check, from (text, background or "") for each cell."""
    fills = {
        (i, j): fill for i, (_, cells) in enumerate(rows) for j, (_, fill) in enumerate(cells, 1) if fill}
    texts = tuple((name, *(text for text, _ in cells)) for name, cells in rows)
    return Table(title, ("pass", *checks), texts, fills, tuple(notes))
