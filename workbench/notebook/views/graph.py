"""The graph as boxes that open: folded modules, and operators with all their facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import traitlets
from ipywidgets import Button, Checkbox, Text
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.facts import facts_of
from workbench.notebook.views.boxes import draw
from workbench.notebook.views.graph_tree import GraphTree
from workbench.notebook.views.lineage import history
from workbench.notebook.views.node_facts import node_facts
from workbench.notebook.views.placement import Placed, placement_of
from workbench.notebook.views.view import View


class GraphView(View):
    """Boxes by module path, identical blocks as one; search by operator, module or source line.

    `graphs`: a graph, or several by name (saved tensors link `forward` and `backward`). `records`: the passes of the
    run, for the history of a node. `placement`: the placement of a parameter or buffer, in words.
    `query` is what is searched; `selected` the operator whose facts are shown; `opened` the open modules, None for the
    first look; `fold` whether identical blocks are one.
    """

    query = traitlets.Unicode().tag(sync=True)
    selected = traitlets.Unicode().tag(sync=True)
    opened: Any = traitlets.List(traitlets.Unicode(), None, allow_none=True).tag(sync=True)
    fold = traitlets.Bool(True).tag(sync=True)

    def __init__(
        self,
        graphs: GraphModule | Mapping[str, GraphModule],
        records: Sequence[PassRecord] = (),
        placement: Placed | None = None,
        title: str = "",
    ):
        if isinstance(graphs, GraphModule):
            graphs = {facts_of(graphs).part: graphs}
        self._graphs, self._records, self._placement = graphs, records, placement
        self._trees: dict[Any, GraphTree] = {}
        super().__init__("graph", title or f"{next(iter(graphs), '')} graph")
        whole = Button(description="whole graph", tooltip="close all modules")
        whole.on_click(self._whole)
        search = Text(
            placeholder="operator, module, file.py:line",
            description="search",
            continuous_update=False,
        )
        self.add(
            self.link("query", search),
            self.link("fold", Checkbox(description="identical blocks as one", indent=False)),
            whole,
        )

    def _whole(self, _: Any) -> None:
        self.opened, self.selected, self.query = None, "", ""
        self.send({"fit": True})

    def tree(self, **_: Any) -> GraphTree:
        """The tree that is shown, made at its first use."""
        if None not in self._trees:
            self._trees[None] = GraphTree(self._graphs)
        return self._trees[None]

    def on_view(self, opened: list[str] | None, fold: bool = True, **step: Any) -> dict[str, Any]:
        tree = self.tree(**step)
        opened = tree.first_look() if opened is None else opened
        view = draw(tree, opened, fold)
        # what the static picture counts
        calls = sum(node.op == "call_function" for node in tree.nodes)
        return {"boxes": view.boxes, "links": view.links, "note": view.note, "missing": tree.missing,
                "operators": calls, "inputs": len(tree.nodes) - calls, "opened": opened}

    def on_find(self, query: str, **step: Any) -> dict[str, Any]:
        ids, count = self.tree(**step).find(query)
        return {"ids": ids, "count": count}

    def on_way(self, id: str, opened: list[str], fold: bool, **step: Any) -> dict[str, Any]:
        """The modules to open so that `id` is visible, and whether blocks may stay folded."""
        tree = self.tree(**step)
        wanted = list(dict.fromkeys([*opened, *tree.way_to(id)]))
        seen = {box.id for box in draw(tree, wanted, fold).boxes}
        return {"opened": wanted, "fold": fold and id in seen}

    def on_details(self, id: str, **step: Any) -> dict[str, Any]:
        tree = self.tree(**step)
        i = tree.named[id]
        node, part = tree.nodes[i], tree.parts[i]
        rows = node_facts(node)
        rows.insert(3, ("placement", placement_of(node, self._placement)))
        if came := history(self._records, part, node.name):
            rows.append(("history", "; ".join(came)))
        return {"name": f"{part}: {node.name}", "rows": rows}
