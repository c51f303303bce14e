"""What Inductor made of a graph: which kernel computes which nodes, in which order, from which source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.nodes import kind_of, module_path, provenance
from workbench.torch_api.inductor import kernels as inductor_kernels
from workbench.torch_api.inductor.kernels import GENERATED, KINDS
from workbench.torch_api.inductor.regions import seen_of
from workbench.torch_api.ops import COMPILED_REGION

_NEEDS_NONE = ("view", "bookkeeping")


@dataclass(frozen=True)
class Kernel:
    """One call of a kernel. kind: `triton` and `cpp` are generated, `extern` is a library's or an operator's (matmuls).

    number: of the call, from 0, in calling order. nodes: of the graph, by name, in its order; one may be in several
    kernels, which compute it anew, or bring the inputs of a library's call into its layout. others: nodes that
    Inductor's own passes put in. modules and places: of the nodes, each once. source: of a generated kernel; "" else.
    """

    number: int
    name: str
    kind: str
    nodes: tuple[str, ...]
    others: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    source: str = field(default="", repr=False)

    @property
    def launches(self) -> bool:
        """Whether it starts work; a wait does not."""
        return self.kind != "wait"

    def __repr__(self) -> str:
        own = f", {len(self.others)} of Inductor's own" if self.others else ""
        return f"Kernel({self.number} {self.name}, {self.kind}, nodes: {_few(self.nodes)}{own})"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one graph in calling order, and what became of every operator node of it.

    nodes: all. views: in no kernel, and need none, since they compute nothing. same: taken out by Inductor's passes,
    with the node that is read instead. removed: taken out for nothing. not_found: in no kernel that was seen, and not
    known why. missing: what could not be observed, a sentence each. code: the whole wrapper, as Inductor wrote it.
    """

    graph: str
    kernels: tuple[Kernel, ...]
    nodes: tuple[str, ...] = field(repr=False)
    views: tuple[str, ...] = ()
    same: dict[str, str] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    not_found: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    code: str = field(default="", repr=False)

    def by_node(self, name: str) -> list[Kernel]:
        """The kernels that compute a node, or what is read instead of it; none for views and what was not found.

        Raises WorkbenchError where the graph has no such operator node.
        """
        if name not in self.nodes:
            near = get_close_matches(name, self.nodes, 3)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(self.nodes)} operators"
            raise WorkbenchError(f"the {self.graph} graph has no operator node {name!r}: {hint}")
        wanted = self.same.get(name, name)
        return [k for k in self.kernels if name in k.nodes or wanted in k.nodes]

    @property
    def kinds(self) -> dict[str, int]:
        """Calls by kind, in the order of `KINDS`."""
        counts = Counter(k.kind for k in self.kernels)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    @property
    def fused(self) -> tuple[int, int]:
        """(nodes, kernels): how many different nodes in how many generated kernels; libraries' calls left out."""
        generated = [k for k in self.kernels if k.kind in GENERATED]
        return len({n for k in generated for n in k.nodes}), len(generated)

    @property
    def launches(self) -> int:
        """Calls that start work: all but waits. A call of a library may launch more than one kernel."""
        return sum(k.launches for k in self.kernels)

    def __repr__(self) -> str:
        return f"Kernels({self.summary()})"

    def summary(self) -> str:
        """One line: counts, and what was not found by name."""
        nodes, kernels = self.fused
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items()) or "none seen"
        parts = [f"{self.graph}: {len(self.nodes)} nodes, {len(self.kernels)} calls ({kinds})",
                 f"{nodes} nodes in {kernels} generated kernels", f"{len(self.views)} views in none",
                 f"{len(self.same) + len(self.removed)} taken out by Inductor's passes",
                 f"not found: {_few(self.not_found)}"]
        return "; ".join([*parts, *(f"missing: {text}" for text in self.missing)])


def _few(names: tuple[str, ...], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def find_kernels(compiled: Any, graph: GraphModule) -> Kernels | None:
    """The kernels of what Inductor compiled from `graph`; None where Inductor did not make `compiled`."""
    seen = inductor_kernels.seen(compiled)
    if seen is None:
        return None
    calls = {n.name: n for n in graph.graph.nodes if n.op == "call_function"}
    written = inductor_kernels.sources(seen.code)
    kernels = tuple(
        Kernel(i, c.name, c.kind, c.nodes, c.others, *_origins([calls[n] for n in c.nodes if n in calls]),
               written.get(c.name, ""))
        for i, c in enumerate(seen.calls))
    gone = {*seen.same, *seen.removed}.union(*(c.nodes for c in seen.calls))
    left = [n for name, n in calls.items() if name not in gone]
    views = tuple(n.name for n in left if kind_of(n) in _NEEDS_NONE) if seen.calls else ()
    return Kernels(facts_of(graph).part, kernels, tuple(calls), views, dict(seen.same), seen.removed,
                   tuple(n.name for n in left if n.name not in views), seen.missing, seen.code)


def region_kernels(graph: GraphModule) -> tuple[Kernels, ...]:
    """The kernels of each compiled region of a graph, in the order of their calls, with their number; or none.

    Inductor traces a region again: nodes are what it made of the region's operators, by the names that it gave them,
    and have no module and no source line. A region that was compiled alike before shares that one's kernels.
    """
    which, found = facts_of(graph).part, []
    for number, call in enumerate(n for n in graph.graph.nodes if COMPILED_REGION in n.meta):
        for seen in seen_of(call):
            written = inductor_kernels.sources(seen.code)
            kernels = tuple(Kernel(i, c.name, c.kind, c.nodes, c.others, source=written.get(c.name, ""))
                            for i, c in enumerate(seen.calls))
            nodes = dict.fromkeys(n for c in seen.calls for n in c.nodes)
            name = f"{which} {number}, {getattr(call.target, '__name__', call.name)}"
            found.append(Kernels(name, kernels, tuple(nodes), (), dict(seen.same), seen.removed, (), seen.missing,
                                 seen.code))
    return tuple(found)


def _origins(nodes: list[Node]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    modules = dict.fromkeys(m for n in nodes if (m := module_path(n)))
    return tuple(modules), tuple(dict.fromkeys(p for n in nodes if (p := provenance(n).place)))
