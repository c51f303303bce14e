"""inductor_decomposition: operators become the primitives that Inductor lowers.

    >>> example("inductor_decomposition", lambda x, weight: torch.nn.functional.silu(x @ weight))
    before:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      silu: float32 [4, 4] = aten.silu(mm)  # layers.0
      ...
    after:
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      neg: float32 [4, 4] = aten.neg(mm)  # layers.0
      exp: float32 [4, 4] = aten.exp(neg)  # layers.0
      add: float32 [4, 4] = aten.add.Tensor(exp, 1)  # layers.0
      div: float32 [4, 4] = aten.div.Tensor(mm, add)  # layers.0
      ...
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from workbench.errors import WorkbenchError
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api import aot
from workbench.torch_api import tree as pytree
from workbench.torch_api.inductor import lowering
from workbench.torch_api.ops import is_symbolic, op_name

_NODE_META = ("val", "tensor_meta", "desc")  # not handed to the replacements of a node


def _signature(value: Any) -> Any:
    """What of a value decides about the body of the operator that reads it."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device
    return type(value).__name__, str(value)


def _values(arguments: Any) -> Any:
    return map_arg(arguments, lambda node: node.meta["val"])


class Decomposer:
    def __init__(self, graph: GraphModule, table: dict[Any, Any]):
        self.old, self.table, self.new = graph, table, Graph()
        self.map: dict[Node, Any] = {}
        self.bodies: dict[Any, GraphModule | None] = {}
        vals = [n.meta.get("val") for n in graph.graph.nodes]
        self.mode = lowering.detect_fake_mode([v for v in vals if isinstance(v, torch.Tensor)])

    def body(self, target: Any, arguments: Any) -> tuple[GraphModule | None, list[Any]]:
        """The traced replacement of one call, or None where the table leaves it alone; and its tensor arguments."""
        leaves, spec = pytree.tree_flatten(arguments)
        values = [leaf.meta["val"] if isinstance(leaf, Node) else leaf for leaf in leaves]
        tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        key = target, spec, tuple(map(_signature, values))
        if key not in self.bodies:

            def call(*inputs: torch.Tensor) -> Any:
                full = list(values)
                for i, tensor in zip(tensors, inputs, strict=True):
                    full[i] = tensor
                args, kwargs = pytree.tree_unflatten(full, spec)
                return target(*args, **kwargs)

            traced = make_fx(call, decomposition_table=self.table)(*(values[i] for i in tensors))
            calls = [n.target for n in traced.graph.nodes if n.op == "call_function"]
            self.bodies[key] = None if calls == [target] else traced
        return self.bodies[key], [leaves[i] for i in tensors]

    def evaluate(self, node: Node) -> None:
        """A fresh fake value, so that aliasing follows the new graph."""
        node.meta.pop("tensor_meta", None)  # of the value that is replaced
        with self.mode:
            node.meta["val"] = node.target(*_values(node.args), **_values(node.kwargs))  # type: ignore[operator]

    def inline(self, node: Node, body: GraphModule, tensors: list[Node]) -> Any:
        inside: dict[Node, Any] = dict(
            zip(body.graph.find_nodes(op="placeholder"), tensors, strict=True)
        )
        inherited = {k: v for k, v in node.meta.items() if k not in _NODE_META}
        for inner in body.graph.nodes:
            if inner.op == "get_attr":
                raise WorkbenchError(
                    f"node {node.name!r} ({node.target}) decomposes into a constant that the graph cannot hold"
                )
            if inner.op == "call_function":
                copied = inside[inner] = self.new.node_copy(inner, inside.__getitem__)
                copied.meta = dict(inherited)
                self.evaluate(copied)
        return map_arg(body.graph.output_node().args[0], inside.__getitem__)

    def copy(self, node: Node) -> Node:
        copied = self.new.node_copy(node, self.map.__getitem__)
        inputs = node.all_input_nodes
        stale = any(old.meta.get("val") is not self.map[old].meta.get("val") for old in inputs)
        # a higher-order operator, as flex_attention, shares no storage with its inputs
        if (
            stale
            and node.op == "call_function"
            and not op_name(node.target).startswith("higher_order.")
        ):
            self.evaluate(copied)
        return copied

    def run(self) -> GraphModule:
        for node in self.old.graph.nodes:
            # a body is traced on its own, without the graph's symbols
            symbolic = any(is_symbolic(n.meta.get("val")) for n in (node, *node.all_input_nodes))
            if node.op == "call_function" and node.target in self.table and not symbolic:
                arguments = map_arg((node.args, node.kwargs), self.map.__getitem__)
                body, tensors = self.body(node.target, arguments)
                if body is not None:
                    self.map[node] = self.inline(node, body, tensors)
                    continue
            if node.target is operator.getitem and not isinstance(self.map[node.args[0]], Node):
                self.map[node] = self.map[node.args[0]][node.args[1]]
            else:
                self.map[node] = self.copy(node)
        self.new.eliminate_dead_code()
        return aot.like(self.old, self.new)


class DecompositionOptions(Options):
    """at: replace the operators in this pass, or already at the capture, which this pass then checks."""

    at: Literal["pass", "capture"] = "pass"

    @property
    def at_capture(self) -> bool:
        return self.at == "capture"


def fewer_composite_operators(
    before: Graphs, after: Graphs, options: DecompositionOptions
) -> Effect:
    """Operators that the table replaces are gone; at the capture: it left none of them."""
    table = lowering.decomposition_table()

    def listed(graphs: Graphs) -> Counter[str]:
        return Counter(str(n.target) for g in graphs for n in g.graph.nodes if n.target in table)

    now = listed(after)
    replaced = dict((listed(before) - now).most_common())
    if options.at_capture:
        reason = (
            f"the graph was captured without the table, and this pass replaced {replaced}"
            if replaced
            else ""
        )
        return Effect(not replaced, reason, {"at": "capture", "left": replaced})
    reason = "" if replaced else "no operator of the graph is in Inductor's table"
    return Effect(bool(replaced), reason, {"replaced": replaced, "left": dict(now)})


@register_pass(
    "inductor_decomposition", stage="joint", numerics="lossy", tolerance=5e-6,
    changes="operators become the primitives that Inductor lowers; every node keeps its metadata",
    options=DecompositionOptions, effect=fewer_composite_operators,
    source="torch._inductor.decomposition.select_decomp_table",
)
def inductor_decomposition(
    gm: GraphModule, example_inputs: list[Any], *, options: DecompositionOptions
) -> GraphModule:
    """Replace every operator in Inductor's table by its body; at="capture" that has been done, and is checked.

    Operators that draw random numbers, such as dropout, are not in the table: a body would draw others than eager.
    """
    return Decomposer(gm, lowering.decomposition_table()).run()
