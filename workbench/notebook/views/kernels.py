"""Nodes to kernels: the generated code beside the nodes that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets
from ipywidgets import Dropdown, Text

from workbench.errors import WorkbenchError
from workbench.graph.read.kernels import Kernels
from workbench.notebook.views.view import View


class KernelView(View):
    """The kernel calls of each graph in order; search by kernel, kind or node. WorkbenchError without any kernel.

    `graph`: whose calls are listed; `query`: what is searched; `selected`: the call whose source is shown.
    """

    graph = traitlets.Unicode().tag(sync=True)
    query = traitlets.Unicode().tag(sync=True)
    selected = traitlets.Int().tag(sync=True)

    def __init__(self, graphs: Sequence[Kernels], title: str = "kernels"):
        self._kernels = {graph.graph: graph for graph in graphs if graph.kernels}
        if not self._kernels:
            reasons = [reason for graph in graphs for reason in graph.missing]
            why = "; ".join(reasons) or "Inductor compiled nothing here"
            raise WorkbenchError(f"no kernel was seen: {why}")
        super().__init__("kernels", title)
        self.graph = next(iter(self._kernels))
        self.add(self.link("graph", Dropdown(options=list(self._kernels), description="graph")),
                 self.link("query", Text(placeholder="kernel, kind or node", description="search")))

    def on_graphs(self) -> dict[str, Any]:
        return {"graphs": [{"name": name, "summary": kernels.summary(),
                            "calls": [(k.name, k.kind, k.nodes) for k in kernels.kernels]}
                           for name, kernels in self._kernels.items()]}

    def on_kernel(self, graph: str, number: int) -> dict[str, Any]:
        kernel = self._kernels[graph].kernels[number]
        rows = [("kind", kernel.kind), ("nodes", ", ".join(kernel.nodes) or "none of the graph's"),
                ("modules", ", ".join(kernel.modules)), ("source lines", ", ".join(kernel.places))]
        if kernel.others:
            rows.append(("Inductor's own", ", ".join(kernel.others)))
        return {"name": f"call {number}: {kernel.name}", "rows": [row for row in rows if row[1]],
                "source": kernel.source or f"({kernel.kind}: its source was not generated)"}
