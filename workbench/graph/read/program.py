"""A graph as a program: one line a node, with the dtype and shape of its result."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from workbench.graph.read.node_facts import described
from workbench.graph.read.nodes import is_backward, module_path
from workbench.graph.read.snapshot import node_record
from workbench.torch_api.aot import is_tangent, parameter_of


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
