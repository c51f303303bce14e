"""What a pass did to a graph, node by node: added, removed, moved, changed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.facts import reading
from workbench.graph.read.program import NodeRecord, node_record


@dataclass(frozen=True)
class GraphDiff:
    """Nodes are matched by name. `moved`: the fewest nodes whose order among the kept ones changed.

    `changed`: another operator or other arguments under the same name, as (before, after).
    """

    added: tuple[NodeRecord, ...]
    removed: tuple[NodeRecord, ...]
    moved: tuple[str, ...]
    changed: tuple[tuple[NodeRecord, NodeRecord], ...]
    lines: tuple[tuple[str, str], ...] = field(repr=False)

    @property
    def summary(self) -> str:
        counts = {name: len(getattr(self, name)) for name in ("added", "removed", "moved", "changed")}
        parts = [f"{count} {name}" for name, count in counts.items() if count]
        return ", ".join(parts) or "no node changed"

    @cached_property
    def marks(self) -> dict[str, str]:
        """What happened to each node of the graph afterwards that is not as it was: `added`, `moved`, `changed`."""
        marks = dict.fromkeys(self.moved, "moved")
        marks |= dict.fromkeys((n.name for n in self.added), "added")
        return marks | {after.name: "changed" for _, after in self.changed}

    def hunks(self, context: int = 2) -> list[list[tuple[str, str]]]:
        """The changed places as lists of (mark, line), each with `context` lines around it."""
        keep = sorted({k for i, (mark, _) in enumerate(self.lines) if mark != " "
                       for k in range(max(0, i - context), min(len(self.lines), i + context + 1))})
        hunks: list[list[tuple[str, str]]] = []
        for at, i in enumerate(keep):
            if not at or i != keep[at - 1] + 1:
                hunks.append([])
            hunks[-1].append(self.lines[i])
        return hunks


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
    old, new = ({node.name: node_record(node) for node in gm.graph.nodes} for gm in (before, after))
    kept = [name for name in new if name in old]
    position = {name: i for i, name in enumerate(old)}
    moved = tuple(kept[i] for i in sorted(displaced([position[name] for name in kept])))
    changed, out_of_place = {name for name in kept if old[name] != new[name]}, set(moved)
    # removed nodes stand behind the last kept node before them
    removed: dict[str, list[tuple[str, str]]] = {"": []}
    anchor = ""
    for name, record in old.items():
        if name in new:
            anchor = name
        else:
            removed.setdefault(anchor, []).append(("-", str(record)))
    lines = removed[""]
    for name, record in new.items():
        if name not in old:
            lines.append(("+", str(record)))
        elif name in changed:
            lines += [("-", str(old[name])), ("+", str(record))]
        else:
            lines.append((">" if name in out_of_place else " ", str(record)))
        lines += removed.get(name, [])
    return GraphDiff(tuple(record for name, record in new.items() if name not in old),
                     tuple(record for name, record in old.items() if name not in new), moved,
                     tuple((old[name], new[name]) for name in kept if name in changed), tuple(lines))


def diffs(record: PassRecord) -> list[GraphDiff]:
    """What the pass did to each of its graphs; empty for a lowering pass."""
    if not record.has_graphs:
        return []
    return [reading(diff, *graphs) for graphs in zip(record.before, record.after, strict=True)]


def tagged(record: PassRecord) -> list[dict[str, str]]:
    """For each graph: the nodes whose recomputation tag the pass changed, with the new tag."""
    tags = []
    for graphs in zip(record.before, record.after, strict=False):
        before, after = map(_tags, graphs)
        tags.append({name: tag for name, tag in after.items() if before.get(name, "none") != tag})
    return tags


def _tags(graph: Any) -> dict[str, str]:
    """The recomputation tag of each node; empty for a callable."""
    nodes = graph.graph.nodes if isinstance(graph, GraphModule) else ()
    return {n.name: getattr(n.meta.get("recompute"), "name", "none") for n in nodes}
