"""The compute between a collective's launch and its wait, in a graph and in the code that Inductor made of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from workbench.graph.read.collectives import list_launches
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
    steps = (((node.name,), products_in(node), costs.compute[node]) for node in graph.graph.nodes)
    return _between(steps, graph, {node.name: ms for node, ms in costs.collective.items()})


def between_calls(kernels: Kernels, graph: GraphModule, times: Sequence[float],
                  needed: Mapping[str, float]) -> dict[str, Between]:
    """The same in calling order; a call that computes matmuls of `graph` counts as one product.

    graph: the one that the kernels were made from. times: milliseconds of each call. needed: of each collective. A
    collective without an observed launch or wait is left out.
    """
    computes = {n.name for n in graph.graph.nodes if is_compute(n)}
    steps = []
    for kernel, ms in zip(kernels.kernels, times, strict=True):
        # another kernel may prepare a collective's inputs
        names = kernel.nodes if kernel.kind in ("collective", "wait") else ()
        steps.append((names, int(not computes.isdisjoint(kernel.nodes)), ms))
    return _between(steps, graph, needed)


def _between(steps: Iterable[tuple[tuple[str, ...], int, float]], graph: GraphModule,
             needed: Mapping[str, float]) -> dict[str, Between]:
    """steps: the launches and waits in order, and the products and milliseconds of each."""
    start_of = {wait: c.node for c in list_launches(graph) for wait in c.waits if wait != c.node}
    starts: dict[str, tuple[int, float]] = {}
    by_start: dict[str, Between] = {}
    products, ms = 0, 0.0
    for names, more, cost in steps:
        for name in names:
            start = start_of.get(name, "")
            if start in starts and start in needed:
                launched, at = starts[start]
                by_start.setdefault(start, Between(products - launched, ms - at, needed[start]))
            starts.setdefault(name, (products, ms))
        products += more
        ms += cost
    return by_start
