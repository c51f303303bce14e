"""One direction of a step, or all of it, as a callable, with the graph that names its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.graph.facts import Part, StepFacts, facts_of
from workbench.graph.read.kernels import Kernels, find_kernels, region_kernels
from workbench.torch_api import aot


@dataclass
class Body:
    """Called with one list, which it may empty, it returns the outputs of `graph`.

    function: what a lowering pass made of `graph`, or a function that runs `graph` node by node.
    """

    function: Callable[[list[Any]], Any]
    graph: GraphModule = field(repr=False)
    step: StepFacts = field(repr=False)

    _boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        return self.function(args)

    @property
    def part(self) -> Part:
        return facts_of(self.graph).part

    @property
    def backward(self) -> bool:
        return self.part == "backward"

    @property
    def inputs(self) -> list[torch.fx.Node]:
        return self.graph.graph.find_nodes(op="placeholder")

    @property
    def kernels(self) -> Kernels | None:
        """The kernels that Inductor made of the graph; None where it did not compile it."""
        return find_kernels(self.function, self.graph)

    def keeps_address(self, node: torch.fx.Node) -> bool:
        """Whether an input has the same address in each step: parameters, buffers, the optimizer's state, and tensors
        that the forward saved.
        """
        if self.part == "step" and aot.is_state(node):
            return True
        return not aot.is_tangent(node) if self.backward else aot.parameter_of(node) is not None


def graph_of(graph_or_body: GraphModule | Body) -> GraphModule:
    """The graph itself, or the graph of a body."""
    return graph_or_body.graph if isinstance(graph_or_body, Body) else graph_or_body


def kernels_of(before: Sequence[Any], after: Sequence[Any]) -> tuple[Kernels, ...]:
    """Inductor's kernels in the input and output of a lowering or replay pass, or in the compiled regions of graphs.

    Empty where Inductor compiled nothing.
    """
    if all(isinstance(output, GraphModule) for output in after):
        return tuple(k for graph in after for k in region_kernels(graph))
    kernels = [source.kernels if isinstance(source, Body) else find_kernels(output, source)
               for source, output in zip(before, after, strict=True)]
    return tuple(k for k in kernels if k is not None)


def bodies_of(
    graphs: tuple[GraphModule, ...], lowered: tuple[Any, ...] | None, step: StepFacts
) -> tuple[Body, ...]:
    """The bodies that a replay pass receives: `lowered`, or functions that run the graphs node by node."""
    functions = lowered or tuple(aot.boxed(graph) for graph in graphs)
    return tuple(
        Body(function, graph, step) for function, graph in zip(functions, graphs, strict=True)
    )
