"""A graph as a program: one line a node, with the dtype and shape of its result."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch.fx import GraphModule, Node

from workbench.graph.read.nodes import described, is_backward, module_path
from workbench.torch_api.aot import is_tangent, parameter_of
from workbench.torch_api.ops import op_name


class NodeRecord(NamedTuple):
    """One node as text. `inputs` are the names of the nodes it reads."""

    name: str
    op: str
    target: str
    args: str
    inputs: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} = {self.target}{self.args}"
            if self.op == "call_function"
            else f"{self.op} {self.name}"
        )


def program(gm: GraphModule) -> str:
    """The nodes in order, such as `mm: float32 [4, 8] = aten.mm(view, t)`. A comment names each input's role.

    In a joint graph, a comment marks the first node of the backward.
    """
    lines, backward = [], False
    for node in gm.graph.nodes:
        if node.op != "placeholder" and not backward and is_backward(node):
            backward = True
            lines.append("# backward")
        lines.append(_line(node))
    return "\n".join(lines)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    left = f"{node.name}: {described(node.meta.get('val'))}"
    if node.op == "placeholder":
        role = parameter_of(node) or ("tangent" if is_tangent(node) else "input")
        return f"{left}  # {role}"
    text = str(node_record(node)).removeprefix(f"{node.name} = ")
    where = module_path(node)
    return f"{left} = {text}" + (f"  # {where}" if where else "")


def node_record(node: Node) -> NodeRecord:
    """One node as text, its operator without the overload `default`."""
    arguments = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
    return NodeRecord(
        node.name,
        node.op,
        _called(node.target) if node.op == "call_function" else str(node.target),
        f"({', '.join(arguments)})",
        tuple([n.name for n in node.all_input_nodes]),
    )


@functools.cache
def _called(target: Any) -> str:
    overload = getattr(target, "_overloadname", "default")
    return op_name(target) if overload == "default" else f"{op_name(target)}.{overload}"
