"""A change of a variant: figures and verdicts before and after."""

from __future__ import annotations

from workbench.notebook.draw.picture import Table
from workbench.notebook.draw.verdicts import failures
from workbench.tools.variant import Difference

CHANGED = "#c9dff0"


def difference(change: Difference) -> Table:
    """A row for each verdict and figure, filled where it changed.

    Below: which stages ran again, and what failed.
    """
    rows = tuple(change.rows())
    fills = {(i, 3): CHANGED for i, row in enumerate(rows) if row[3]}
    notes = [f"ran again: {', '.join(change.ran) or 'nothing'}",
             f"kept: {', '.join(change.kept) or 'nothing'}"]
    for when, side in (("before", change.before), ("after", change.after)):
        for name, verdicts in side.verdicts.items():
            notes += failures(f"{when}, {name}", verdicts)
    return Table(change.title, ("", "before", "after", "change"), rows, fills, tuple(notes))
