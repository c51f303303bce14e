"""The changes of one pass: the lines that it added, removed and moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.read.collectives import axis_names
from workbench.notebook.draw.picture import Table
from workbench.notebook.graph_diff import diffs, tagged

# no verdict's colours: a change is neither right nor wrong
FILLS = {
    "-": "#ece4f4",
    "+": "#d5c6e8",
    ">": "#c9dff0",
}


def with_axes(record: PassRecord) -> Callable[[str], str]:
    """A function that replaces the names of process groups, which differ from run to run, by mesh axes."""
    groups = {
        f"'{name}'": axis
        for gm in (*record.before, *record.after)
        if isinstance(gm, GraphModule)
        for name, axis in axis_names(gm).items()
    }

    def said(text: str) -> str:
        for name, axis in groups.items() if "_c10d" in text else ():
            text = text.replace(name, axis)
        return text

    return said


def changes(record: PassRecord, limit: int = 30) -> Table:
    """The changed lines, before and after side by side, at most `limit` of each graph.

    A line that only moved says on the left in front of which kept node it stands now. Below are the nodes tagged for
    the partitioner.
    """
    said = with_axes(record)
    rows: list[tuple[str, str, str]] = []
    fills: dict[tuple[int, int], str] = {}
    notes = []
    for part, diff, tags in zip(record.parts, diffs(record), tagged(record), strict=False):
        changed = [(mark, text, _moved_to(diff.lines[at + 1:]) if mark == ">" else "")
                   for at, (mark, text) in enumerate(diff.lines) if mark != " "]
        i = 0
        while i < len(changed) and i < limit:
            mark, text, place = changed[i]
            pair = mark == "-" and i + 1 < len(changed) and changed[i + 1][0] == "+"
            after = changed[i + 1][1] if pair else text if mark != "-" else ""
            before = text if mark == "-" else place
            fills |= {(len(rows), column): FILLS[m] for column, m, t in
                      ((1, mark, before), (2, mark.replace("-", "+"), after)) if t}
            rows.append((part, said(before), said(after)))
            i += 1 + pair
        if len(changed) > limit:
            notes.append(f"{part}: {len(changed) - limit} more changed lines")
        if tags:
            by_tag = sorted(Counter(tags.values()).items())
            counts = ", ".join(f"{count} {tag}" for tag, count in by_tag)
            notes.append(f"{part}: {len(tags)} tagged for the partitioner ({counts})")
    return Table(f"{record.name}: what it changed", ("graph", "before", "after"), tuple(rows), fills, tuple(notes))


def _moved_to(below: Sequence[tuple[str, str]]) -> str:
    """Where a moved node stands, given the lines below its own."""
    kept = next(text for mark, text in below if mark not in "->")
    return f"(moved, now in front of {kept.split(' = ')[0].split()[-1]})"
