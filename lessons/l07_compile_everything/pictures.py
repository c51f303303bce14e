"""A table of kernels with their nodes."""

from __future__ import annotations

from collections.abc import Collection

from workbench.notebook.draw.kernels import Given, given_kernels
from workbench.notebook.draw.picture import Table, shortened
from workbench.recipe.wording import few


def kernel_table(what: Given, *, kind: str | None = None, nodes: Collection[str] | None = None) -> Table:
    """A row for each call: kernel, kind, its nodes, their modules and source lines. The HTML also has the nodes' names.

    kind: only calls of that kind, and no column for it; nodes: only calls with any of these. A column names the graph
    where there are several. Raises WorkbenchError where Inductor compiled nothing.
    """
    given = given_kernels(what)
    picked = [(f, k) for f in given for k in f.kernels
              if kind in (None, k.kind) and (nodes is None or not {*k.nodes}.isdisjoint(nodes))]
    rows = tuple((f.graph, k.number, _short(k.name), k.kind, len(k.nodes), few(k.modules, 2), few(k.places, 2),
                  ", ".join(k.nodes)) for f, k in picked)
    heads = ("graph", "call", "kernel", "kind", "nodes", "modules", "source lines", "names")
    kept = [i for i, head in enumerate(heads) if (head, len(given)) != ("graph", 1) and (head != "kind" or not kind)]
    return Table("kernels in calling order", tuple(heads[i] for i in kept),
                 tuple(tuple(row[i] for i in kept) for row in rows),
                 notes=tuple(f.summary() for f in given), hidden=("names",))


def _short(name: str) -> str:
    """The beginning, and the number at the end, which tells generated kernels apart."""
    return shortened(name.removeprefix("torch.ops."), 56, head=42)
