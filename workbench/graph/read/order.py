"""The compute between a collective's launch and its wait, in a graph and in the code that Inductor made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from workbench.graph.read.collectives import Collective, list_collectives, list_host_copies
from workbench.graph.read.kernels import Kernels
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.timeline import Costs
from workbench.torch_api.ops import COMPILED_REGION


class Between(NamedTuple):
    """What stands between a collective's launch and its first wait.

    products: number of matmuls and attentions. ms: estimated milliseconds of all compute there. needed_ms: of the
    collective itself.
    """

    products: int
    ms: float
    needed_ms: float

    @property
    def hides(self) -> bool:
        """Whether a matmul or attention is there, or other compute that takes as long as the collective."""
        return self.products > 0 or (self.ms > 0 and self.ms >= self.needed_ms)


def products_in(node: Node) -> int:
    """The number of matmuls and attentions of a node; of a compiled region, those inside."""
    if COMPILED_REGION in node.meta:
        return int(node.meta[COMPILED_REGION]["products"])
    return int(is_compute(node))


def between(graph: GraphModule, costs: Costs) -> dict[str, Between]:
    """By launch. A blocking collective, which has no wait, is left out."""
    before: dict[str, tuple[int, float]] = {}
    products, ms = 0, 0.0
    for node in graph.graph.nodes:
        before[node.name] = (products, ms)
        products += products_in(node)
        ms += costs.compute[node]
    needed = {node.name: cost for node, cost in costs.collective.items()}
    found = {}
    for c in _waited(graph):
        ends = min(before[w] for w in c.waits)
        found[c.node] = Between(
            ends[0] - before[c.node][0], ends[1] - before[c.node][1], needed[c.node]
        )
    return found


def between_calls(kernels: Kernels, graph: GraphModule, times: Sequence[float],
                  needed: Mapping[str, float]) -> dict[str, Between]:
    """The same in calling order; a call that computes matmuls of `graph` counts as one product.

    graph: the one that the kernels were made from. times: milliseconds of each call. needed: of each collective. A
    collective without an observed launch or wait is left out.
    """
    computes = {n.name for n in graph.graph.nodes if is_compute(n)}
    start_of = {wait: c.node for c in _waited(graph) for wait in c.waits}
    starts: dict[str, tuple[int, float]] = {}
    found: dict[str, Between] = {}
    products, ms = 0, 0.0
    for kernel, cost in zip(kernels.kernels, times, strict=True):
        if kernel.kind == "collective":
            starts |= {name: (products, ms) for name in kernel.nodes if name not in starts}
        elif kernel.kind == "wait":
            for start in (start_of[name] for name in kernel.nodes if name in start_of):
                if start in starts and start in needed:
                    at = starts[start]
                    found.setdefault(start, Between(products - at[0], ms - at[1], needed[start]))
        products += not computes.isdisjoint(kernel.nodes)
        ms += cost
    return found


def _waited(graph: GraphModule) -> list[Collective]:
    """Collectives and copies to or from the host, but for those that block."""
    found = [*list_collectives(graph), *list_host_copies(graph)]
    return [c for c in found if c.waits and c.node not in c.waits]
