"""What a collective sends, as the ranks compare it: not its values, but how they are computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from hashlib import blake2b

from torch.fx import GraphModule, Node

from workbench.graph.partition import saved_nodes
from workbench.graph.read.nodes import module_path, output_values
from workbench.torch_api import aot
from workbench.torch_api.ops import aliased_inputs, op_name, written_inputs

_LAYOUT = {"aten." + name for name in (
    "alias", "as_strided", "clone", "constant_pad_nd", "detach", "expand", "narrow", "permute", "reshape", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view",
    "contiguous")}
"""What one rank may do and another not, where a mesh axis does not divide a size; and how each takes its own piece. A
concatenation of pieces of one tensor is layout, too: so are some padded."""


def digests(graphs: Sequence[GraphModule]) -> dict[Node, str]:
    """For each node a digest of the operators and inputs of the step that it is computed from.

    It is the same on all ranks of one program: numbers, sizes and process groups do not count. What a backward takes of
    its forward counts as what the forward computes.
    """
    table: dict[Node, str] = {}
    for graph in graphs:
        if len(graphs) == 2 and graph is graphs[1]:
            inputs = graph.graph.find_nodes(op="placeholder")
            saved = saved_nodes(*graphs)
            for node, source in zip(inputs, saved, strict=False):
                table[node] = table.get(source, "")
        for node in graph.graph.nodes:
            if node not in table:
                table[node] = _digest(node, table)
            bases = written_inputs(node)
            for base in bases:
                table[base] = table[node]
                bases += aliased_inputs(base)[:1]
    return table


def _digest(node: Node, table: dict[Node, str]) -> str:
    inputs = node.all_input_nodes
    if node.op != "call_function":
        parts = [str(node.meta.get("desc") or node.target)]
    elif inputs and _is_layout(node):
        return table.get(inputs[0], "")
    else:
        index = str(node.args[1]) if node.target is operator.getitem else ""
        parts = [op_name(node.target), index]
        parts += [table.get(source, "") for source in inputs]  # in a broken graph it may come later
    return blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


def _is_layout(node: Node) -> bool:
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    if node.op != "call_function":
        return False
    if op_name(node.target) == "aten.cat":
        return len(set(map(_source, node.all_input_nodes))) == 1
    return op_name(node.target) in _LAYOUT


def _source(node: Node) -> Node:
    """The node whose elements this one has, in another layout."""
    while node.all_input_nodes and _is_layout(node):
        node = node.all_input_nodes[0]
    return node


def gradient_digests(graphs: Sequence[GraphModule]) -> dict[str, str]:
    """By parameter, the digest of the gradient that the step returns; "" where it returns None."""
    table, gradients = digests(graphs), {}
    for graph in graphs:
        descs = graph.graph.output_node().meta.get("desc") or []
        for desc, value in zip(descs, output_values(graph), strict=False):
            if name := aot.gradient_of(desc):
                gradients[name] = table.get(value, "")
    return gradients


def operand_name(launch: Node) -> str:
    """The parameter that a collective sends, or else the operator and the module that computed it."""
    node = _source(next(iter(launch.all_input_nodes), launch))
    if name := aot.parameter_of(node):
        return name
    place = module_path(node)
    operation = op_name(node.target) if node.op == "call_function" else f"input {node.name}"
    return f"{operation} in {place}" if place else operation
