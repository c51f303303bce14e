"""The kernels that Inductor made of a graph: their nodes, calling order and source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.nodes import kind_of, module_path, provenance
from workbench.recipe.wording import few
from workbench.torch_api.inductor import kernels as inductor_kernels
from workbench.torch_api.inductor.kernels import GENERATED, KINDS
from workbench.torch_api.inductor.regions import seen_of
from workbench.torch_api.ops import COMPILED_REGION

_NEEDS_NONE = ("view", "bookkeeping")


@dataclass(frozen=True)
class Kernel:
    """One kernel call. kind: `triton` and `cpp` are generated, `extern` calls a library or an operator (matmuls).

    number: position in calling order, from 0. nodes: names of the graph's nodes that it computes, in their order. A
    node may be in several kernels, which recompute it or prepare the layout of a library call's inputs. others: nodes
    that Inductor's own passes added. modules, places: of the nodes, each once. source: of a generated kernel, else "".
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
        """Whether the call launches work. A wait does not."""
        return self.kind != "wait"

    def __repr__(self) -> str:
        others = f", {len(self.others)} of Inductor's own" if self.others else ""
        return f"Kernel({self.number} {self.name}, {self.kind}, nodes: {few(self.nodes, 5) or 'none'}{others})"


@dataclass(frozen=True)
class Kernels:
    """The kernels of one graph in calling order, and what became of each of its operator nodes.

    nodes: all operator nodes. views: nodes that need no kernel, since they compute nothing. same: nodes that Inductor's
    passes removed, with the node that replaces each. removed: nodes that they removed without replacement. not_found:
    nodes in no observed kernel, for an unknown reason. missing: what could not be observed, one sentence each. code:
    the whole wrapper, as Inductor wrote it.
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

    @property
    def kinds(self) -> dict[str, int]:
        """Calls by kind, in the order of `KINDS`."""
        counts = Counter(k.kind for k in self.kernels)
        return {kind: counts[kind] for kind in KINDS if counts[kind]}

    @property
    def fused(self) -> tuple[int, int]:
        """(nodes, kernels): number of distinct nodes in generated kernels, and of these kernels."""
        generated = [k for k in self.kernels if k.kind in GENERATED]
        return len({n for k in generated for n in k.nodes}), len(generated)

    @property
    def launches(self) -> int:
        """Number of calls that launch work: all but waits. A library call may launch several kernels."""
        return sum(k.launches for k in self.kernels)

    def __repr__(self) -> str:
        return f"Kernels({self.summary()})"

    def summary(self) -> str:
        """One line: counts, and the names of nodes that were not found."""
        nodes, kernels = self.fused
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items()) or "none seen"
        parts = [
            f"{self.graph}: {len(self.nodes)} nodes, {len(self.kernels)} calls ({kinds})",
            f"{nodes} nodes in {kernels} generated kernels",
            f"{len(self.views)} views in none",
            f"{len(self.same) + len(self.removed)} taken out by Inductor's passes",
            f"not found: {few(self.not_found, 5) or 'none'}",
        ]
        return "; ".join([*parts, *(f"missing: {text}" for text in self.missing)])


def find_kernels(compiled: Any, graph: GraphModule) -> Kernels | None:
    """The kernels of `compiled`, which Inductor compiled from `graph`; None if Inductor did not compile it."""
    seen = inductor_kernels.seen(compiled)
    if seen is None:
        return None
    calls = {n.name: n for n in graph.graph.nodes if n.op == "call_function"}
    gone = {*seen.same, *seen.removed}.union(*(c.nodes for c in seen.calls))
    left = [n for name, n in calls.items() if name not in gone]
    views = tuple(n.name for n in left if kind_of(n) in _NEEDS_NONE) if seen.calls else ()
    return Kernels(facts_of(graph).part, _kernels(seen, calls), tuple(calls), views, dict(seen.same), seen.removed,
                   tuple(n.name for n in left if n.name not in views), seen.missing, seen.code)


def region_kernels(graph: GraphModule) -> tuple[Kernels, ...]:
    """The kernels of each compiled region of a graph, in calling order.

    Inductor traces a region again and renames its operators, so these nodes have no module and no source line. A region
    that was compiled identically before shares the kernels of that one.
    """
    which, kernels = facts_of(graph).part, []
    for number, call in enumerate(n for n in graph.graph.nodes if COMPILED_REGION in n.meta):
        for seen in seen_of(call):
            nodes = dict.fromkeys(n for c in seen.calls for n in c.nodes)
            name = f"{which} {number}, {getattr(call.target, '__name__', call.name)}"
            kernels.append(Kernels(name, _kernels(seen), tuple(nodes), (), dict(seen.same), seen.removed, (),
                                 seen.missing, seen.code))
    return tuple(kernels)


def _kernels(
    seen: inductor_kernels.Seen, known: Mapping[str, Node] = MappingProxyType({})
) -> tuple[Kernel, ...]:
    """The calls as kernels, with module and source line of the `known` nodes."""
    written, kernels = inductor_kernels.sources(seen.code), []
    for i, call in enumerate(seen.calls):
        nodes = [known[n] for n in call.nodes if n in known]
        modules = tuple(dict.fromkeys(m for n in nodes if (m := module_path(n))))
        places = tuple(dict.fromkeys(p for n in nodes if (p := provenance(n).place)))
        kernels.append(Kernel(i, call.name, call.kind, call.nodes, call.others, modules, places,
                           written.get(call.name, "")))
    return tuple(kernels)
