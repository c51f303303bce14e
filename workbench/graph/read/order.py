"""What stands between a collective's start and its wait: in a graph, and in the code that Inductor made of it."""

from __future__ import annotations

from torch.fx import GraphModule

from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.kernels import Kernels
from workbench.graph.read.nodes import is_compute


def products_between(graph: GraphModule) -> dict[str, int]:
    """Matmuls and attention between the start of each collective and its first wait, by the start's name.

    A collective without a wait, which blocks until it has ended, is left out.
    """
    before: dict[str, int] = {}
    seen = 0
    for node in graph.graph.nodes:
        before[node.name] = seen
        seen += is_compute(node)
    return {c.node: min(before[w] for w in c.waits) - before[c.node] for c in list_collectives(graph)
            if c.waits and c.node not in c.waits}


def products_between_calls(kernels: Kernels, graph: GraphModule) -> dict[str, int]:
    """The same in calling order: calls that compute a matmul or attention of `graph`, the graph they were made from.

    A collective whose start or wait was not seen among the calls is left out.
    """
    computes = {n.name for n in graph.graph.nodes if is_compute(n)}
    start_of = {wait: c.node for c in list_collectives(graph) for wait in c.waits}
    starts: dict[str, int] = {}
    found: dict[str, int] = {}
    seen = 0
    for kernel in kernels.kernels:
        if kernel.kind == "collective":
            starts |= {name: seen for name in kernel.nodes if name not in starts}
        elif kernel.kind == "wait":
            for start in (start_of[name] for name in kernel.nodes if name in start_of):
                if start in starts:
                    found.setdefault(start, seen - starts[start])
        seen += not computes.isdisjoint(kernel.nodes)
    return found
