"""Where a node came from, through every pass of a run."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from workbench.checks.record import PassRecord

WORDS = {"added": "added by", "moved": "moved by", "changed": "changed by"}


def history(records: Sequence[PassRecord], part: str, name: str) -> list[str]:
    """What each pass did to the node `name` of the graph `part` (joint, forward or backward), in order.

    The history begins with `captured` or `made by partition`, unless a pass added the node. Names are torch's, and the
    partitioner keeps those of the joint graph.
    """
    said: list[str] = []
    joint = [r for r in records if r.parts == ("joint",)]
    before = joint[0].before[0] if joint else None
    if before is not None and _has(before, name):
        said.append("captured")
    for record in records:
        if part in record.parts or record.parts == ("joint",):
            diffs = record.diffs()
            where = record.parts.index(part) if part in record.parts else 0
            if diffs and (mark := diffs[where].marks.get(name)):
                said.append(f"{WORDS[mark]} {record.name}")
    later = next((r for r in records if r.parts != ("joint",)), None)
    if (
        later is not None
        and part in later.parts
        and not said
        and _has(later.before[later.parts.index(part)], name)
    ):
        said.append("made by partition" if joint else "captured, or made by partition")
    return said


def _has(graph: GraphModule, name: str) -> bool:
    return any(n.name == name for n in graph.graph.nodes)
