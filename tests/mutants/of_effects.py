"""Mutation operators on what a graph does besides computing: random numbers, writes, unfilled memory."""

from __future__ import annotations

from random import Random

from mutants.edits import ATEN, calls, face, first, floating, insert, mutation, pure, reread
from torch.fx import GraphModule, Node

from workbench.torch_api.ops import is_random, op_name, written_inputs


@mutation("random numbers", lambda gm: [n for n in calls(gm) if is_random(n)])
def redraw(gm: GraphModule, rng: Random, node: Node):
    """A value that was drawn is drawn again for its last reader, as in a recomputation with another random state."""
    users = [u for u in node.users if u.op == "call_function"]
    if not users:
        return None
    again = insert(gm, node, node.target, *node.args, **node.kwargs)
    users[-1].replace_input_with(node, again)
    return [node, again, users[-1]]


@mutation("random numbers", lambda gm: [n for n in calls(gm) if floating(n) and pure(n) and
          n.users])
def draw_another(gm: GraphModule, rng: Random, node: Node):
    """A drawn value is replaced by a new draw of the same shape, such as a recomputed dropout mask."""
    fresh = insert(gm, node, ATEN.rand_like.default, node)
    reread(node, fresh)
    return [node, fresh]


@mutation("random numbers")
def swap_draws(gm: GraphModule, rng: Random):
    """Readers of one drawn mask read that of another draw of the same shape."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    masks = [u for n in calls(gm) if is_random(n) for u in n.users if op_name(u.target) == "operator.getitem"]

    def use(node: Node):
        twins = [(m, u) for m in masks for u in node.users
                 if m is not node and face(m) == face(node) and order[u] > order[m]]
        if not twins:
            return None
        other, user = rng.choice(twins)
        user.replace_input_with(node, other)
        return [node, other, user]
    return first(rng, masks, use)


@mutation("random numbers")
def draw_uselessly(gm: GraphModule, rng: Random):
    """Random numbers are drawn that nothing reads, so that later draws get others."""
    sites = [n for n in calls(gm) if floating(n) and pure(n)]
    return first(rng, sites, lambda node: [node, insert(gm, node, ATEN.rand_like.default, node)])


@mutation("random numbers", lambda gm: [u for n in calls(gm) if is_random(n) for u in (n, *n.users) if
          face(u) and u.users])
def draw_constant(gm: GraphModule, rng: Random, node: Node):
    """A drawn value is replaced by a constant."""
    ones = insert(gm, node, ATEN.ones_like.default, node)
    users = [u.name for u in node.users]
    reread(node, ones)
    return [node, ones, *users]


@mutation("writes")
def write_input(gm: GraphModule, rng: Random):
    """An input of the step is overwritten behind its last reader."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}

    def use(node: Node):
        readers = [u for u in node.users if u.op == "call_function"]
        if not readers:
            return None
        last = max(readers, key=order.__getitem__)
        return [node, insert(gm, last, ATEN.mul_.Tensor, node, 2.0)]
    return first(rng, [n for n in gm.graph.find_nodes(op="placeholder") if floating(n)], use)


@mutation("writes")
def write_value(gm: GraphModule, rng: Random):
    """A value is overwritten between two of its readers."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}

    def use(node: Node):
        readers = sorted((u for u in node.users if u.op == "call_function"), key=order.__getitem__)
        if len(readers) < 2:
            return None
        return [node, insert(gm, readers[0], ATEN.mul_.Tensor, node, 2.0), readers[-1]]
    return first(rng, [n for n in calls(gm) if floating(n) and pure(n) and face(n)], use)


@mutation("writes", lambda gm: calls(gm, "aten.add", "aten.mul", "aten.sub", "aten.div",
          "aten.neg", "aten.exp", "aten.silu", "aten.rsqrt"))
def write_in_place(gm: GraphModule, rng: Random, node: Node):
    """An operator writes its result over its first input, as fusion in place does."""
    packet = getattr(ATEN, op_name(node.target).removeprefix("aten.") + "_", None)
    overload = getattr(packet, node.target._overloadname, None)
    if overload is None or face(node.args[0]) != face(node):
        return None
    node.target = overload
    return [node, node.args[0]]


@mutation("writes", lambda gm: [n for n in calls(gm) if written_inputs(n)])
def drop_write(gm: GraphModule, rng: Random, node: Node):
    """A write is dropped, and its readers read the memory as it was."""
    names, target = [node.name, *(u.name for u in node.users)], written_inputs(node)[0]
    if node.users and face(target) != face(node):
        return None
    node.replace_all_uses_with(target)
    gm.graph.erase_node(node)
    return [*names, target]


@mutation("writes", lambda gm: calls(gm, "aten.full", "aten.zeros", "aten.new_zeros",
          "aten.zeros_like", "aten.full_like", "aten.scalar_tensor"))
def leave_unfilled(gm: GraphModule, rng: Random, node: Node):
    """A tensor of zeros or of another constant is not filled."""
    if not face(node):
        return None
    value = node.meta["val"]
    empty = insert(gm, node, ATEN.empty.memory_format, [int(s) for s in value.shape], dtype=value.dtype,
                   device=value.device)
    empty.meta["val"] = value
    reread(node, empty)
    return [node, empty]


@mutation("writes")
def steal_memory(gm: GraphModule, rng: Random):
    """A result is written into the memory of an earlier value that is still read."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}

    def use(node: Node):
        victims = [v for v in calls(gm) if pure(v) and face(v) == face(node) and order[v] < order[node]
                   and any(order[u] > order[node] for u in v.users)]
        if not victims:
            return None
        victim = rng.choice(victims)
        copied = insert(gm, node, ATEN.copy_.default, victim, node)
        return [node, victim, copied]
    return first(rng, [n for n in calls(gm) if floating(n) and pure(n)], use)
