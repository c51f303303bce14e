"""The changes of one pass: where it added, removed and moved nodes, and the changed lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.read.collectives import axis_names
from workbench.graph.read.diff import GraphDiff
from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, INK, ORANGE, PINK, RED
from workbench.notebook.draw.picture import Picture, Table, finish, panels

MARKS = {"removed": RED, "added": GREEN, "moved": BLUE, "changed": ORANGE, "tagged": PINK}
# no verdict's colours: a change is neither right nor wrong
FILLS = {
    "-": "#ece4f4",
    "+": "#d5c6e8",
    ">": "#c9dff0",
}


def step(record: PassRecord) -> Picture:
    """The graphs before and after as strips: removed nodes in the first, added, moved and changed ones in the second.

    A pass that returns a callable instead of a graph has no strips: `kernels` and `replay` show those.
    """
    diffs = dict(zip(record.parts, record.diffs(), strict=False))
    tags = dict(zip(record.parts, record.tagged(), strict=False))
    rows = [
        (f"{part}, {when}", len(gm.graph.nodes), _places(found, when, gm, tags[part]))
        for (part, found), before, after in zip(
            diffs.items(), record.before, record.after, strict=False
        )
        for when, gm in (("before", before), ("after", after))
    ]
    figure, (axes,) = panels(9.6, 0.9 + 0.42 * max(1, len(rows)))
    longest = max((length for _, length, _ in rows), default=1)
    for y, (_, length, places) in enumerate(rows):
        axes.barh(y, length, 0.62, color=FAINT, edgecolor="#cccccc", linewidth=0.6)
        for mark, at in places.items():
            axes.vlines(
                at, y - 0.31, y + 0.31, color=MARKS[mark], linewidth=max(0.7, 500 / longest)
            )
    axes.set_yticks(range(len(rows)), [said for said, _, _ in rows], fontsize=9)
    axes.set(xlim=(0, longest), ylim=(len(rows) - 0.5, -0.5), xlabel="nodes, in their order")
    axes.spines["left"].set_visible(False)
    for mark, color in MARKS.items():
        axes.plot([], [], color=color, linewidth=4, label=mark)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    axes.set_title(record.name, fontsize=10, loc="right", color=INK)
    if not rows:
        axes.text(0.5, 0, "it leaves no graph", ha="center")
    lines = [f"{record.name}: {record.outcome}"]
    for part, found in diffs.items():
        gained = ", ".join(f"{count:+d} {op}" for op, count in list(found.by_op().items())[:8])
        lines.append(f"{part}: {found.summary}" + (f" ({gained})" if gained else ""))
        if tags[part]:
            counted = ", ".join(
                f"{n} {tag}" for tag, n in sorted(Counter(tags[part].values()).items())
            )
            lines.append(f"{part}: {len(tags[part])} tagged for the partitioner ({counted})")
    return finish(
        figure, "Where a pass changed the graphs. " + "; ".join(lines) + ".", "\n".join(lines)
    )


def _places(
    found: GraphDiff, when: str, gm: GraphModule, tags: dict[str, str]
) -> dict[str, list[int]]:
    """Positions in `gm` of the changed nodes: of removed ones in the graph before, of the others in the graph after."""
    if when == "after":
        words = dict.fromkeys(tags, "tagged") | found.marks
    else:
        words = {name: word for name, word in found.marks.items() if word == "changed"}
        words |= {node.name: "removed" for node in found.removed}
    places: dict[str, list[int]] = {}
    for at, node in enumerate(gm.graph.nodes):
        if node.name in words:
            places.setdefault(words[node.name], []).append(at)
    return places


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

    A line that only moved says on the left in front of which kept node it stands now.
    """
    said = with_axes(record)
    rows: list[tuple[str, str, str]] = []
    fills: dict[tuple[int, int], str] = {}
    notes = []
    for part, found in zip(record.parts, record.diffs(), strict=False):
        changed = [(mark, text, _moved_to(found.lines[at + 1:]) if mark == ">" else "")
                   for at, (mark, text) in enumerate(found.lines) if mark != " "]
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
    return Table(f"{record.name}: what it changed", ("graph", "before", "after"), tuple(rows), fills, tuple(notes))


def _moved_to(below: Sequence[tuple[str, str]]) -> str:
    """Where a moved node stands, given the lines below its own."""
    kept = next(text for mark, text in below if mark not in "->")
    return f"(moved, now in front of {kept.split(' = ')[0].split()[-1]})"
