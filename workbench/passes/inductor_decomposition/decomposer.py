"""Each operator in Inductor's table is replaced by its body.

A retrace of the whole graph with `make_fx` would drop the metadata of most nodes, and the partitioner would then
recompute the forward in the backward. Here each decomposed operator is traced alone, once for each distinct
signature, and its body takes the place of the node; the other nodes stay as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.errors import WorkbenchError
from workbench.torch_api import aot
from workbench.torch_api import tree as pytree
from workbench.torch_api.inductor import lowering
from workbench.torch_api.ops import is_symbolic, op_name

_OWN = ("val", "tensor_meta", "desc")  # belongs to one node and is never handed to its replacements


def _signature(target: Any, leaves: list[Any], spec: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return "tensor", tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device
        return type(leaf).__name__, str(leaf)

    return target, spec, tuple(one(leaf) for leaf in leaves)


def _values(arguments: Any) -> Any:
    return pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, Node) else a, arguments)


class Decomposer:
    def __init__(self, graph: GraphModule, table: dict[Any, Any]):
        self.old, self.table = graph, table
        vals = [n.meta.get("val") for n in graph.graph.nodes]
        self.mode = lowering.detect_fake_mode([v for v in vals if isinstance(v, torch.Tensor)])
        self.new, self.map, self.bodies = Graph(), dict[Node, Any](), dict[Any, GraphModule | None]()

    def body(self, target: Any, args: Any, kwargs: Any) -> tuple[GraphModule | None, list[Any]]:
        """The traced replacement of one call, or None where the table leaves it alone; and the flat arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        values = [leaf.meta["val"] if isinstance(leaf, Node) else leaf for leaf in leaves]
        key = _signature(target, values, spec)
        if key not in self.bodies:
            positions = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]

            def call(*tensors: torch.Tensor) -> Any:
                full = list(values)
                for i, tensor in zip(positions, tensors, strict=True):
                    full[i] = tensor
                a, k = pytree.tree_unflatten(full, spec)
                return target(*a, **k)

            traced = make_fx(call, decomposition_table=self.table)(*(values[i] for i in positions))
            calls = [n for n in traced.graph.nodes if n.op == "call_function"]
            same = len(calls) == 1 and calls[0].target is target
            self.bodies[key] = None if same else traced
        return self.bodies[key], [leaf for leaf, v in zip(leaves, values, strict=True) if isinstance(v, torch.Tensor)]

    def evaluate(self, node: Node) -> None:
        """A fresh fake value, so that aliasing follows the new graph."""
        node.meta.pop("tensor_meta", None)  # of the value that is replaced
        with self.mode:
            node.meta["val"] = node.target(*_values(node.args), **_values(node.kwargs))  # type: ignore[operator]

    def inline(self, node: Node, body: GraphModule, tensors: list[Node]) -> Any:
        inside: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), tensors, strict=True))
        inherited = {k: v for k, v in node.meta.items() if k not in _OWN}
        for inner in body.graph.nodes:
            if inner.op == "get_attr":
                raise WorkbenchError(
                    f"node {node.name!r} ({node.target}) decomposes into a constant that the graph cannot hold"
                )
            if inner.op == "call_function":
                copied = self.new.node_copy(inner, inside.__getitem__)
                copied.meta = dict(inherited)
                self.evaluate(copied)
                inside[inner] = copied
        result = body.graph.output_node().args[0]
        return pytree.tree_map(lambda n: inside.get(n, n) if isinstance(n, Node) else n, result)

    def copy(self, node: Node) -> Node:
        copied = self.new.node_copy(node, self.map.__getitem__)
        stale = any(old.meta.get("val") is not self.map[old].meta.get("val") for old in node.all_input_nodes)
        # a higher-order operator, as flex_attention, shares no storage with its inputs
        if stale and node.op == "call_function" and not op_name(node.target).startswith("higher_order."):
            self.evaluate(copied)
        return copied

    def run(self) -> GraphModule:
        for node in self.old.graph.nodes:
            if node.op == "output":
                break
            # a body is traced on its own, without the graph's symbols
            symbolic = any(is_symbolic(n.meta.get("val")) for n in (node, *node.all_input_nodes))
            if node.op == "call_function" and node.target in self.table and not symbolic:
                args, kwargs = pytree.tree_map(
                    lambda a: self.map[a] if isinstance(a, Node) else a, (node.args, node.kwargs)
                )
                body, tensors = self.body(node.target, args, kwargs)
                if body is not None:
                    self.map[node] = self.inline(node, body, tensors)
                    continue
            if node.target is operator.getitem and not isinstance(self.map[node.args[0]], Node):
                self.map[node] = self.map[node.args[0]][node.args[1]]
                continue
            self.map[node] = self.copy(node)
        old_output = self.old.graph.output_node()
        output = self.new.output(
            pytree.tree_map(lambda a: self.map[a] if isinstance(a, Node) else a, old_output.args[0])
        )
        output.meta = dict(old_output.meta)
        self.new.eliminate_dead_code()
        return aot.like(self.old, self.new)
