"""A change of a variant: figures and verdicts before and after."""

from __future__ import annotations

from workbench.notebook.draw.picture import Table
from workbench.notebook.draw.verdicts import failures
from workbench.tools.variant import Difference

CHANGED = "#c9dff0"


def difference(found: Difference) -> Table:
    """A row for each verdict and figure, filled where it changed.

    Below: which stages ran again, and what failed.
    """
    rows = tuple(found.rows())
    fills = {(i, 3): CHANGED for i, row in enumerate(rows) if row[3]}
    notes = [f"ran again: {', '.join(found.ran) or 'nothing'}",
             f"kept: {', '.join(found.kept) or 'nothing'}"]
    for when, side in (("before", found.before), ("after", found.after)):
        for name, verdicts in side.verdicts.items():
            notes += failures(f"{when}, {name}", verdicts)
    return Table(found.title, ("", "before", "after", "change"), rows, fills, tuple(notes))
