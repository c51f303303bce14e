"""Where a node came from, through every pass of a run."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.checks.record import PassRecord
from workbench.graph.callables import graph_of
from workbench.notebook.graph_diff import diffs


def history(records: Sequence[PassRecord], part: str, name: str) -> list[str]:
    """What each pass did to the node `name` of the graph `part` (joint, forward or backward), in order.

    The history begins with `captured` or `made by partition`, unless a pass added the node. Names are torch's, and the
    partitioner keeps those of the joint graph.
    """
    said: list[str] = []
    joint_passes = any(record.parts == ("joint",) for record in records)
    for record in records:
        is_joint = record.parts == ("joint",)
        if not is_joint and part not in record.parts:
            continue
        where = 0 if is_joint else record.parts.index(part)
        if not said and any(node.name == name for node in graph_of(record.before[where]).graph.nodes):
            parted = "made by partition" if joint_passes else "captured, or made by partition"
            said.append("captured" if is_joint else parted)
        changes = diffs(record)
        if changes and (mark := changes[where].marks.get(name)):
            said.append(f"{mark} by {record.name}")
    return said
