"""What "Two captures" looks up for its reader: wrong modules, and the promise proposed for a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from workbench import draw
from workbench.checks.record import PassRecord
from workbench.graph.read.nodes import provenance
from workbench.notebook.draw.picture import Table


def wrong_modules(gm: GraphModule, found: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """How many backward nodes have another module in `found`, and how many have none; and the first wrong one."""
    truth = {n.name: provenance(n) for n in gm.graph.nodes if n.op == "call_function"}
    back = {name: each.module for name, each in truth.items() if each.backward}
    wrong = [name for name, module in back.items() if found.get(name, module) != module]
    first = f"first wrong node: {wrong[0]}, and the answer says {found[wrong[0]]!r}" if wrong else ""
    return {"nodes with another module": len(wrong), "nodes without an entry": len(back.keys() - found)}, first


def with_promises(records: Sequence[PassRecord]) -> Table:
    """The verdicts of each pass, and the promise on its values that was proposed for it."""
    table = draw.verdicts(records)
    rows = [(*row, str(record.item.contract.numerics)) for row, record in zip(table.rows, records, strict=True)]
    return replace(table, columns=(*table.columns, "proposed"), rows=tuple(rows))
