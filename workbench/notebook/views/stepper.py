"""A slider over the passes of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import traitlets
from ipywidgets import Dropdown, IntSlider
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.notebook.draw.step import with_axes
from workbench.notebook.graph_diff import diffs, tagged
from workbench.notebook.views.graph import GraphView
from workbench.notebook.views.graph_tree import GraphTree
from workbench.notebook.views.placement import Placed
from workbench.torch_api.ops import op_name

HUNKS = 40
ROWS = 10


def _operators(gm: GraphModule) -> Counter[str]:
    """How often each operator is in a graph, most frequent first."""
    names = Counter(op_name(n.target) for n in gm.graph.nodes if n.op == "call_function")
    return Counter(dict(names.most_common()))


class PassStepper(GraphView):
    """What each pass added, removed, moved and tagged, in the graph and in its lines, with its census and verdicts.

    `step` and `part`: which pass and which of its graphs is shown. `around`: lines around each change. Raises
    WorkbenchError without a record.
    """

    step = traitlets.Int().tag(sync=True)
    part = traitlets.Unicode().tag(sync=True)
    around = traitlets.Int(1).tag(sync=True)

    def __init__(
        self, records: Sequence[PassRecord], placement: Placed | None = None, title: str = "passes"
    ):
        if not records:
            raise WorkbenchError("no pass has run: there is nothing to step through")
        super().__init__({}, records, placement, title)
        self.kind, self.part = "stepper", records[0].parts[0]
        parts = self.link("part", Dropdown(options=records[0].parts, description="graph"))
        self.observe(lambda change: setattr(parts, "options", self._parts(change.new)), "step")
        self.add(
            self.link("step", IntSlider(max=len(records) - 1, description="pass", readout=False)),
            parts,
            self.link("around", Dropdown(options=[1, 4, 16], description="lines around")),
        )

    def _parts(self, step: int) -> list[str]:
        return list(self._at(step, "")[0].parts)

    def on_first(self, step: int, part: str) -> dict[str, Any]:
        """The first contents of a step in one answer, which the page prefetches and caches."""
        return {"view": self.on_view(None, step=step, part=part), "step": self.on_step(step, part),
                "hunks": self.on_hunks(step, part, 1)}

    def tree(self, step: int = 0, part: str = "", **_: Any) -> GraphTree:
        record, which = self._at(step, part)
        key = (step, which)
        if key not in self._trees:
            graph = record.after[which]
            shown = graph if isinstance(graph, GraphModule) else record.before[which]
            self._trees[key] = GraphTree({record.parts[which]: shown}, self._marks(record, which))
        return self._trees[key]

    def _at(self, step: int, part: str) -> tuple[PassRecord, int]:
        record = self._records[step]
        return record, record.parts.index(part) if part in record.parts else 0

    def _marks(self, record: PassRecord, which: int) -> dict[str, str]:
        marks = [diff.marks for diff in diffs(record)]
        return dict.fromkeys(tagged(record)[which], "tagged") | (marks[which] if marks else {})

    def on_steps(self) -> dict[str, Any]:
        return {"steps": [{"name": r.name, "parts": r.parts,
                           "verdicts": [(v.check, v.outcome, v.message) for v in r.verdicts]} for r in self._records]}

    def on_step(self, step: int, part: str) -> dict[str, Any]:
        record, which = self._at(step, part)
        before, after = record.before[which], record.after[which]
        if not isinstance(before, GraphModule) or not isinstance(after, GraphModule):
            summary = f"{record.name} leaves no graph: here is the graph that it took"
            return {"summary": summary, "rows": []}
        old, new = _operators(before), _operators(after)
        changed = {op: (old[op], new[op]) for op in old | new if old[op] != new[op]}
        rows = sorted(changed.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:ROWS]
        said = diffs(record)[which].summary
        if tags := len(tagged(record)[which]):
            said += f", {tags:,} tagged for the partitioner"
        return {"summary": f"{old.total():,} operators before, {new.total():,} after: {said}",
                "rows": [(op, str(a), str(b)) for op, (a, b) in rows]}

    def on_hunks(self, step: int, part: str, context: int) -> dict[str, Any]:
        record, which = self._at(step, part)
        changes = diffs(record)
        hunks = changes[which].hunks(context) if changes else []
        why = "no line changed" if changes else "it leaves no graph"
        said = with_axes(record)
        shown = [[(mark, said(line)) for mark, line in hunk] for hunk in hunks[:HUNKS]]
        return {"hunks": shown, "left": max(0, len(hunks) - HUNKS), "why": why}
