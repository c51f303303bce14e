"""Mutation operators on nodes: one is dropped, doubled, moved or given another operator."""

from __future__ import annotations

from random import Random

from mutants.edits import (
    ATEN,
    calls,
    earlier,
    face,
    floating,
    insert,
    mutation,
    pure,
    reread,
    tensor_places,
)
from torch.fx import GraphModule, Node

from workbench.torch_api.ops import op_name

UNARY = ("neg", "abs", "exp", "sigmoid", "tanh", "sin", "cos", "relu", "silu", "rsqrt", "sqrt", "log", "square")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
TWINS = {"aten.ge": "aten.gt", "aten.gt": "aten.ge", "aten.lt": "aten.le", "aten.le": "aten.lt", "aten.ne": "aten.eq",
         "aten.eq": "aten.ne", "aten.sum": "aten.mean", "aten.mean": "aten.sum", "aten.amax": "aten.amin",
         "aten.silu_backward": "aten.sigmoid_backward", "aten._log_softmax": "aten._softmax",
         "aten.bitwise_and": "aten.bitwise_or", "aten.pow": "aten.mul"}


@mutation("nodes", calls)
def drop_node(gm: GraphModule, rng: Random, node: Node):
    """A node is dropped, and its readers read one of its inputs of the same shape and dtype."""
    twins = [a for a in node.all_input_nodes if face(a) == face(node)]
    if not twins or not pure(node) or op_name(node.target) in ("aten.alias", "aten.detach", "aten.view"):
        return None
    names = [node.name, *(u.name for u in node.users)]
    node.replace_all_uses_with(rng.choice(twins))
    gm.graph.erase_node(node)
    return names


@mutation("nodes", calls)
def drop_and_leave_readers(gm: GraphModule, rng: Random, node: Node):
    """A node is dropped, and its readers read an earlier value of another shape or dtype."""
    others = [n for n in earlier(gm, node) if face(n) != face(node)]
    if not pure(node) or not others or not face(node):
        return None
    names = [node.name, *(u.name for u in node.users)]
    node.replace_all_uses_with(rng.choice(others))
    gm.graph.erase_node(node)
    return names


@mutation("nodes", calls)
def replace_by_stranger(gm: GraphModule, rng: Random, node: Node):
    """All readers of a node read an earlier, unrelated value of the same shape and dtype."""
    twins = [n for n in earlier(gm, node) if face(n) == face(node) and n not in node.all_input_nodes]
    if not pure(node) or not twins or not node.users:
        return None
    names = [node.name, *(u.name for u in node.users)]
    node.replace_all_uses_with(rng.choice(twins))
    return names


@mutation("nodes", lambda gm: [n for n in calls(gm) if pure(n)])
def duplicate_node(gm: GraphModule, rng: Random, node: Node):
    """A node is computed a second time, and its last reader reads the copy."""
    if not node.users or node.next.op == "output":
        return None
    copy = insert(gm, node, node.target, *node.args, **node.kwargs)
    user = list(node.users)[-1]
    user.replace_input_with(node, copy)
    return [node, copy, user]


@mutation("nodes", calls)
def apply_twice(gm: GraphModule, rng: Random, node: Node):
    """An operator is applied to its own result once more."""
    place = next((i for i in tensor_places(node) if face(node.args[i]) == face(node)), None)
    if not pure(node) or place is None or op_name(node.target) in ("aten.alias", "aten.detach", "aten.view"):
        return None
    again = insert(gm, node, node.target, *node.args[:place], node, *node.args[place + 1:], **node.kwargs)
    reread(node, again)
    return [node, again]


@mutation("nodes", calls)
def move_before_input(gm: GraphModule, rng: Random, node: Node):
    """A node is moved before a node whose result it reads."""
    made = [a for a in node.all_input_nodes if a.op == "call_function"]
    if not made:
        return None
    made[0].prepend(node)
    return [node, made[0]]


@mutation("nodes", calls)
def move_behind_reader(gm: GraphModule, rng: Random, node: Node):
    """A node is moved behind its first reader."""
    readers = [u for u in node.users if u.op == "call_function"]
    if not readers:
        return None
    readers[0].append(node)
    return [node, readers[0]]


@mutation("nodes", calls)
def move_in_bounds(gm: GraphModule, rng: Random, node: Node):
    """A node is moved to just before its first reader."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    readers = sorted((u for u in node.users if u.op == "call_function"), key=order.__getitem__)
    if not readers or order[readers[0]] < order[node] + 3:
        return None
    readers[0].prepend(node)
    return [node]


@mutation("operators", lambda gm: [n for n in calls(gm, *(f"aten.{u}" for u in UNARY)) if
          len(n.args) == 1])
def retarget_unary(gm: GraphModule, rng: Random, node: Node):
    """An operator of one tensor becomes another one, such as silu for gelu's place."""
    name = op_name(node.target).removeprefix("aten.")
    others = [u for u in UNARY if u != name]
    node.target = getattr(ATEN, rng.choice(others)).default
    return [node]


@mutation("operators", calls)
def retarget_binary(gm: GraphModule, rng: Random, node: Node):
    """A sum becomes a difference, a product or a quotient, or the other way."""
    if str(node.target).removeprefix("aten.") not in BINARY or node.kwargs or not floating(node):
        return None
    packet, overload = rng.choice([b for b in BINARY if f"aten.{b}" != str(node.target)]).split(".")
    node.target = getattr(getattr(ATEN, packet), overload)
    return [node]


@mutation("operators", lambda gm: calls(gm, *TWINS))
def retarget_twin(gm: GraphModule, rng: Random, node: Node):
    """An operator becomes its neighbour with the same arguments: ge for gt, sum for mean, amax for amin."""
    packet = getattr(ATEN, TWINS[op_name(node.target)].removeprefix("aten."))
    overload = node.target._overloadname
    names = [o for o in packet.overloads() if o == overload or (overload == "dim_IntList" and o == "dim")
             or (overload == "dim" and o == "dim_IntList") or (overload == "Tensor_Scalar" and o == "Scalar")]
    if not names:
        return None
    node.target = getattr(packet, names[0])
    return [node]
