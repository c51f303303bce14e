"""Parts of a graph as graphs of their own, and the names of the values that pass between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.read.nodes import output_values
from workbench.torch_api import aot
from workbench.torch_api.subgraph import subgraph

Described = tuple[Node, Any]
"""A node, and the descriptor of the input or output that it is."""


@dataclass
class Piece:
    """takes: names of the whole graph's inputs, and of what earlier pieces give. gives: names of its results."""

    graph: GraphModule
    body: Callable[[list[Any]], Any]
    takes: list[str]
    gives: list[str]

    def __call__(self, values: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
        """Its results by name. Empties `values`, so that each value is freed after its last use."""
        args = [values[name] if name in values else shared[name] for name in self.takes]
        values.clear()
        return dict(zip(self.gives, self.body(args), strict=True))


def pieces(gm: GraphModule, part_of: Callable[[Node], int], count: int) -> list[Piece]:
    """Piece p of `count` runs the operators with part_of(node) == p, and gives what others or the caller read."""
    part = {node: part_of(node) for node in gm.graph.nodes if node.op == "call_function"}
    parts = []
    for number in range(count):
        nodes = [node for node in part if part[node] == number]
        read = {n for node in nodes for n in node.all_input_nodes}.difference(nodes)
        takes = sorted(n for n in read if n.op != "get_attr")
        gives = [n for n in nodes if any(part.get(user) != number for user in n.users)]
        graph = subgraph(gm, takes, [(n, None) for n in gives], {n.name for n in nodes})
        names = ([n.name for n in side] for side in (takes, gives))
        parts.append(Piece(graph, aot.boxed(graph), *names))
    return parts


def named_outputs(gm: GraphModule) -> list[Described]:
    """Each output that is a node, with its descriptor."""
    outputs = zip(output_values(gm), gm.graph.output_node().meta["desc"], strict=False)
    return [(node, desc) for node, desc in outputs if isinstance(node, Node)]
