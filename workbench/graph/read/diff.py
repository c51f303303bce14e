"""What a pass did to a graph, node by node: added, removed, moved, retargeted, rewired."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from workbench.graph.read.program import NodeRecord, node_record


@dataclass(frozen=True)
class GraphDiff:
    """Nodes are matched by name. `moved`: the fewest nodes whose order among the kept ones changed.

    `retargeted`: another operator under the same name; `rewired`: the same operator, other arguments.
    """

    added: tuple[NodeRecord, ...]
    removed: tuple[NodeRecord, ...]
    moved: tuple[str, ...]
    retargeted: tuple[tuple[NodeRecord, NodeRecord], ...]
    rewired: tuple[tuple[NodeRecord, NodeRecord], ...]
    lines: tuple[tuple[str, str], ...] = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.moved or self.retargeted or self.rewired)

    @property
    def summary(self) -> str:
        parts = [
            f"{len(getattr(self, name))} {name}"
            for name in ("added", "removed", "moved", "retargeted", "rewired")
            if getattr(self, name)
        ]
        return ", ".join(parts) or "no node changed"

    def by_op(self) -> dict[str, int]:
        """Operators gained (positive) and lost (negative), largest change first."""
        change = Counter(n.target for n in self.added)
        change.subtract(n.target for n in self.removed)
        for a, b in self.retargeted:
            change[a.target] -= 1
            change[b.target] += 1
        return {op: n for op, n in sorted(change.items(), key=lambda item: -abs(item[1])) if n}

    @cached_property
    def marks(self) -> dict[str, str]:
        """What happened to each node of the graph afterwards that is not as it was: `added`, `moved`, `changed`."""
        found = dict.fromkeys(self.moved, "moved") | dict.fromkeys(
            (n.name for n in self.added), "added"
        )
        return found | {b.name: "changed" for _, b in (*self.retargeted, *self.rewired)}

    def hunks(self, context: int = 2) -> list[list[tuple[str, str]]]:
        """The changed places as lists of (mark, line), each with `context` lines around it."""
        keep = sorted({k for i, (mark, _) in enumerate(self.lines) if mark != " "
                       for k in range(max(0, i - context), min(len(self.lines), i + context + 1))})
        found: list[list[tuple[str, str]]] = []
        for at, i in enumerate(keep):
            if not at or i != keep[at - 1] + 1:
                found.append([])
            found[-1].append(self.lines[i])
        return found

    def text(self, context: int = 1, limit: int = 80) -> str:
        """The changed places as `-`, `+`, `>` (moved) and unmarked lines, hunks parted by `...`."""
        shown = [f"{mark} {line}" for k, hunk in enumerate(self.hunks(context))
                 for mark, line in [*([("...", "")] if k else []), *hunk]]
        places = len(shown)
        shown = [line.rstrip() for line in shown[:limit]]
        if places > limit:
            shown.append(f"... and {places - limit} more lines")
        return "\n".join([self.summary, *shown])

    def __str__(self) -> str:
        return self.text()


def displaced(order: Sequence[int]) -> set[int]:
    """Indices into `order` outside one longest increasing subsequence."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for i, value in enumerate(order):
        at = bisect_left(tails, value)
        before.append(ends[at - 1] if at else -1)
        if at == len(tails):
            tails.append(value)
            ends.append(i)
        else:
            tails[at], ends[at] = value, i
    stay: set[int] = set()
    i = ends[-1] if ends else -1
    while i >= 0:
        stay.add(i)
        i = before[i]
    return set(range(len(order))) - stay


def diff(before: torch.fx.GraphModule, after: torch.fx.GraphModule) -> GraphDiff:
    """Compare the graphs before and after a pass, node by node."""
    old, new = ([node_record(node) for node in gm.graph.nodes] for gm in (before, after))
    was, now = {n.name: n for n in old}, {n.name: n for n in new}
    position = {n.name: i for i, n in enumerate(old)}
    kept = [n for n in new if n.name in was]
    moved_at = displaced([position[n.name] for n in kept])
    moved = tuple(n.name for i, n in enumerate(kept) if i in moved_at)
    pairs = [(was[n.name], n) for n in kept]
    retargeted = tuple((a, b) for a, b in pairs if (a.op, a.target) != (b.op, b.target))
    rewired = tuple(
        (a, b) for a, b in pairs if (a.op, a.target) == (b.op, b.target) and a.args != b.args
    )
    changed = {b.name for _, b in (*retargeted, *rewired)}
    moved_names = set(moved)

    lines: list[tuple[str, str]] = []
    # removed nodes stand after the last kept node before them
    gone: dict[str, list[NodeRecord]] = {}
    anchor = ""
    for n in old:
        if n.name in now:
            anchor = n.name
        else:
            gone.setdefault(anchor, []).append(n)
    lines += [("-", str(n)) for n in gone.get("", [])]
    for n in new:
        if n.name not in was:
            lines.append(("+", str(n)))
        elif n.name in changed:
            lines += [("-", str(was[n.name])), ("+", str(n))]
        else:
            lines.append((">" if n.name in moved_names else " ", str(n)))
        lines += [("-", str(g)) for g in gone.get(n.name, [])]
    return GraphDiff(
        tuple(n for n in new if n.name not in was),
        tuple(n for n in old if n.name not in now),
        moved,
        retargeted,
        rewired,
        tuple(lines),
    )
