"""A part of a graph as a graph of its own. Source: torch/_functorch/partitioners.py."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch._functorch import partitioners
from torch.fx import GraphModule, Node


def subgraph(
    source: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[tuple[Any, Any]],
    keep: Container[str] = (),
) -> GraphModule:
    """A graph of some inputs, any nodes of `source`, that computes these outputs: values, with their descriptors.

    keep: names of nodes that stay for what they write, though no output needs them.
    """
    graph = partitioners._extract_graph_with_inputs_outputs(
        source.graph,
        list(inputs),
        [value for value, _ in outputs],
        [desc for _, desc in outputs],
        ignore_must_be_in_fw_bw=True,
    )
    # of all parts, torch has kept what has side effects, such as waits
    graph.eliminate_dead_code(
        lambda node: node.op != "call_function" or (node.name in keep and node.is_impure())
    )
    for node in graph.find_nodes(op="placeholder"):
        node.meta = dict(node.meta)
    part = GraphModule(source, graph)
    part.meta = dict(source.meta)
    return part
