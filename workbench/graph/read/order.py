"""The compute between a collective's launch and its wait, in a graph and in the code that Inductor made of it."""

from __future__ import annotations

from torch.fx import GraphModule

from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.kernels import Kernels
from workbench.graph.read.nodes import is_compute


def products_between(graph: GraphModule) -> dict[str, int]:
    """The number of matmuls and attentions between each collective's launch and its first wait, by launch.

    A blocking collective, which has no wait, is left out.
    """
    before: dict[str, int] = {}
    seen = 0
    for node in graph.graph.nodes:
        before[node.name] = seen
        seen += is_compute(node)
    return {c.node: min(before[w] for w in c.waits) - before[c.node] for c in list_collectives(graph)
            if c.waits and c.node not in c.waits}


def products_between_calls(kernels: Kernels, graph: GraphModule) -> dict[str, int]:
    """The same in calling order: the number of calls that compute a matmul or attention of `graph`.

    graph: the one that the kernels were made from. A collective without an observed launch or wait is left out.
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
