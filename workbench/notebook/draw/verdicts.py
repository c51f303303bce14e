"""The verdicts of a list of passes as a table: a row a pass, a column a check."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.checks.verdicts import CHECKS, FILLS, Outcome, worst
from workbench.notebook.draw.picture import Table
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted


def verdicts(records: Sequence[PassRecord]) -> Table:
    """What was checked of each pass so far; a check that did not run is UNKNOWN. Reasons stand underneath."""
    rows: list[tuple[str, ...]] = []
    fills: dict[tuple[int, int], str] = {}
    notes: list[str] = []
    for i, record in enumerate(records):
        found = [worst(v for v in record.verdicts if v.check == check) for check in CHECKS]
        fills |= {(i, j): FILLS[outcome] for j, outcome in enumerate(found, 1)}
        rows.append((record.name, *map(str, found)))
        notes += [f"{record.name}: {v.check}: {v.outcome}, {v.message}" for v in record.verdicts
                  if v.outcome in (Outcome.FAIL, Outcome.NO_EFFECT)]
    return Table(counted(len(rows), "pass"), ("pass", *CHECKS), tuple(rows), fills, tuple(notes))
