"""Parts of a graph, descriptors of what passes between stages, and schedules in an order of one's own."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.distributed.pipelining import schedules
from torch.fx import GraphModule, Node

from workbench.torch_api import aot

Described = tuple[Node, Any]
"""A node, and the descriptor of the input or output that it becomes."""
RECEIVED = 1000
"""The descriptors of what stages pass on have numbers from here on, and those of the batch's tensors from 0 on."""


def subgraph(
    source: GraphModule,
    inputs: Sequence[Described],
    outputs: Sequence[Described],
    keep: Container[str] = (),
) -> GraphModule:
    """A graph of these outputs of `source`, with those of the inputs that it needs. keep: names of nodes that stay for
    what they write.
    """
    graph = partitioners._extract_graph_with_inputs_outputs(
        source.graph,
        [n for n, _ in inputs],
        [n for n, _ in outputs],
        [desc for _, desc in outputs],
        ignore_must_be_in_fw_bw=True,
    )
    # of all parts, torch has kept what has side effects, such as waits
    graph.eliminate_dead_code(
        lambda node: node.op != "call_function" or (node.name in keep and node.is_impure())
    )
    nodes = list(graph.find_nodes(op="placeholder"))
    for node, (_, desc) in zip(nodes, inputs, strict=True):
        node.meta = {**node.meta, "desc": desc}
        if aot.is_tangent(node):
            node.target = f"tangents_{node.name}"  # by which torch's partitioner tells it
        if not node.users:
            graph.erase_node(node)
    part = GraphModule(source, graph)
    part.meta = dict(source.meta)
    return part


def received(number: int) -> Any:
    """The descriptor of a forward value that a stage receives."""
    return PlainAOTInput(number)


def sent(number: int) -> Any:
    return PlainAOTOutput(number)


def received_gradient(number: int) -> Any:
    return TangentAOTInput(PlainAOTOutput(number))


def sent_gradient(number: int) -> Any:
    return GradAOTOutput(PlainAOTInput(number))


def is_sent_gradient(desc: Any) -> bool:
    """Whether an output is the gradient of an input that is neither a parameter nor a buffer."""
    return isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput)


def in_order(orders: Sequence[str]) -> type:
    """A schedule that runs each rank's computations in this order, in torch's notation: "0F0 0F1 0I0 0W0"."""

    class InOrder(schedules._PipelineScheduleRuntime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            rows = [list(map(schedules._Action.from_str, row.split())) for row in orders]
            self._prepare_schedule_with_comms(dict(enumerate(rows)))

    return InOrder
