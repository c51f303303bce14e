"""The matrix products of a joint graph, and which of them a linear layer y = x w^T does.

    forward          y  = mm(x, t(w))
    input_gradient   dx = mm(dy, w)
    weight_gradient  dw = mm(t(dy), x)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.memory import Flow
from workbench.graph.read.nodes import is_backward, kind_of, module_path
from workbench.torch_api.ops import op_name

aten = torch.ops.aten
MANY: dict[Any, str] = {aten.bmm.default: "batched", aten.baddbmm.default: "batched",
                        aten._grouped_mm.default: "grouped"}
"""Products of many matrices at once: those of experts, and of attention that is written out."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input_gradient", "weight_gradient"
_VIEWS = ("aten.view", "aten._unsafe_view", "aten.reshape", "aten.alias")


@dataclass(frozen=True)
class Product:
    """One product. which: what it is to its linear layer; "" where it belongs to none. module: the layer's path."""

    node: Node
    which: str
    module: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(m, k, n) of an m x k and a k x n matrix."""
        left, right = (arg.meta["val"].shape for arg in self.node.args[:2])  # type: ignore[union-attr]
        return left[0], left[1], right[1]

    def __str__(self) -> str:
        return f"{self.module or 'no module'} {self.which or self.node.name}"


def products_of(gm: GraphModule) -> Iterator[Product]:
    """Every matrix product in node order."""
    flow = Flow(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and kind_of(node) == "matmul":
            yield Product(node, _which(node, flow), module_path(node))


def _which(node: Node, flow: Flow) -> str:
    if node.target is not aten.mm.default:
        return ""
    operands = node.all_input_nodes
    left, right = map(flow.parameters, operands) if len(operands) == 2 else (None, None)
    if not is_backward(node):
        return FORWARD if right and left is None else ""
    if left:
        return ""
    return INPUT_GRADIENT if right else WEIGHT_GRADIENT


def untransposed(node: Node) -> tuple[Node, bool]:
    """The matrix behind any transposes, and whether `node` is that matrix transposed."""
    turned = False
    while turns(node):
        node, turned = node.all_input_nodes[0], not turned
    return node, turned


def turns(node: Node) -> bool:
    """Whether the node transposes a matrix."""
    name = op_name(node.target) if node.op == "call_function" else ""
    if name == "aten.t":
        return bool(node.meta["val"].ndim == 2)
    if name not in ("aten.permute", "aten.transpose") or node.meta["val"].ndim != 2:
        return False
    dims: Any = node.args[1] if name == "aten.permute" else node.args[1:3]
    first, second = (dim % 2 for dim in dims)
    return bool(first != second) if name == "aten.transpose" else (first, second) == (1, 0)


def viewed(node: Node) -> Node:
    """The value that a chain of views of all its elements, in their order, starts from."""
    while node.op == "call_function" and op_name(node.target) in _VIEWS:
        source = node.all_input_nodes[0]
        if source.meta["val"].dtype != node.meta["val"].dtype:
            break
        node = source
    return node
