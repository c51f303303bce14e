"""Mutation operators between ranks: waits, collectives, their groups and reductions."""

from __future__ import annotations

from random import Random

from mutants.edits import ATEN, calls, face, first, insert, is_start, mutation, pure, reread, starts, with_argument
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import waits_of
from workbench.torch_api.ops import collective_kind, is_wait, multiplies

WAIT = "_c10d_functional.wait_tensor"


def _place(node: Node, name: str) -> int | None:
    """The place of an argument of a collective, by its name in the schema."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index(name) if name in names and names.index(name) < len(node.args) else None


def _given(gm: GraphModule, rng: Random, name: str, change):
    """The argument `name` of one operator that sends becomes `change(old)`."""
    def use(node: Node):
        place = _place(node, name)
        if place is None or (new := change(node.args[place])) is None:
            return None
        with_argument(node, place, new)
        return [node]
    return first(rng, [n for n in calls(gm) if is_start(n) or multiplies(n.target)], use)


@mutation("waits", lambda gm: calls(gm, WAIT))
def lose_wait(gm: GraphModule, rng: Random, node: Node):
    """A wait is lost, and its readers read the running collective."""
    names = [node.name, node.args[0].name, *(u.name for u in node.users)]
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    return names


@mutation("waits", lambda gm: calls(gm, WAIT))
def read_before_wait(gm: GraphModule, rng: Random, node: Node):
    """One reader reads the running collective in the place of its wait."""
    if not node.users:
        return None
    user = rng.choice(list(node.users))
    user.replace_input_with(node, node.args[0])
    return [node, node.args[0], user]


@mutation("waits", lambda gm: calls(gm, WAIT))
def wait_early(gm: GraphModule, rng: Random, node: Node):
    """A wait is moved to just behind its collective, so that nothing runs beside it."""
    if node.prev is node.args[0]:
        return None
    node.args[0].append(node)
    return [node]


@mutation("waits", lambda gm: calls(gm, WAIT))
def wait_twice(gm: GraphModule, rng: Random, node: Node):
    """A wait is waited for once more, and readers read the second wait."""
    again = insert(gm, node, node.target, node)
    reread(node, again)
    return [node, again]


@mutation("waits", lambda gm: calls(gm, WAIT))
def wait_for_nothing(gm: GraphModule, rng: Random, node: Node):
    """A collective gets a second wait that nothing reads."""
    return [node, insert(gm, node, node.target, node.args[0])]


@mutation("waits", lambda gm: calls(gm, WAIT))
def wait_for_another(gm: GraphModule, rng: Random, node: Node):
    """A wait waits for another collective of the same shape, whose wait waits for the first."""
    before = list(gm.graph.nodes)
    twins = [w for w in calls(gm, WAIT) if face(w) == face(node) and w is not node
             and before.index(w.args[0]) < before.index(node) and before.index(node.args[0]) < before.index(w)]
    if not twins:
        return None
    other = rng.choice(twins)
    node.args, other.args = other.args, node.args
    return [node, other]


@mutation("groups")
def another_group(gm: GraphModule, rng: Random):
    """A collective runs over another process group: that of all ranks, or of another axis."""
    return _given(gm, rng, "group_name", lambda old: next(
        (name for name in ["0", *facts_of(gm).groups.values()] if name != old), None) if isinstance(old, str) else None)


@mutation("groups")
def unknown_group(gm: GraphModule, rng: Random):
    """A collective runs over a process group that does not exist."""
    return _given(gm, rng, "group_name", lambda old: "none such" if isinstance(old, str) else None)


@mutation("groups")
def another_group_size(gm: GraphModule, rng: Random):
    """A collective is told another number of ranks."""
    return _given(gm, rng, "group_size", lambda old: old * 2 if isinstance(old, int) else None)


@mutation("collectives")
def another_reduction(gm: GraphModule, rng: Random):
    """A sum between ranks becomes an average, a maximum or the other way."""
    return _given(gm, rng, "reduce_op", lambda old: rng.choice([r for r in ("sum", "avg", "max") if r != old]))


def _shard(start: Node) -> Node | None:
    """The node of a collective's operand that reads an input of the step, where views alone lie between them."""
    node = start.args[0]
    while isinstance(node, Node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        if node.all_input_nodes[0].op == "placeholder":
            return node
        node = node.all_input_nodes[0]
    return None


@mutation("collectives")
def exchange_operands(gm: GraphModule, rng: Random):
    """Two collectives of the same kind and shape exchange their operands."""
    sources = {s: shard for s in starts(gm) if (shard := _shard(s)) is not None}

    def use(node: Node):
        mine = sources[node]
        twins = [s for s, shard in sources.items() if s.target is node.target and shard is not mine
                 and face(shard.args[0]) == face(mine.args[0]) and shard.args[0] is not mine.args[0]]
        if not twins:
            return None
        theirs = sources[rng.choice(twins)]
        one, two = mine.args[0], theirs.args[0]
        with_argument(mine, 0, two)
        with_argument(theirs, 0, one)
        return [node, mine, theirs, *(s for s, shard in sources.items() if shard is theirs)]
    return first(rng, sources, use)


@mutation("collectives")
def take_another_result(gm: GraphModule, rng: Random):
    """The readers of a collective's result read that of an earlier collective of the same shape."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}

    def use(node: Node):
        twins = [w for w in calls(gm, WAIT) if face(w) == face(node) and order[w] < order[node]]
        if not twins or not node.users:
            return None
        other, users = rng.choice(twins), [u.name for u in node.users]
        node.replace_all_uses_with(other)
        return [node, other, *users]
    return first(rng, calls(gm, WAIT), use)


@mutation("collectives", lambda gm: [s for s in starts(gm) if list(s.users) == waits_of(s)])
def drop_collective(gm: GraphModule, rng: Random, start: Node):
    """A collective is left out: each rank goes on with its own part, repeated or cut to the right shape."""
    kind, source, wait = collective_kind(start.target), start.args[0], waits_of(start)[0]
    have, want = source.meta["val"].shape, wait.meta["val"].shape
    if kind == "all_gather" and want[0] == 2 * have[0] and len(start.args) == 3:
        local = insert(gm, start, ATEN.cat.default, [source, source])
    elif kind == "reduce_scatter" and have[0] == 2 * want[0] and len(start.args) == 4:
        local = insert(gm, start, ATEN.slice.Tensor, source, 0, 0, want[0])
    elif kind in ("all_reduce", "all_to_all") and face(source) == face(wait):
        local = insert(gm, start, ATEN.clone.default, source)
    else:
        return None
    names = [start.name, wait.name, local.name, *(u.name for u in wait.users)]
    reread(wait, local)
    gm.graph.erase_node(wait)
    gm.graph.erase_node(start)
    return names


@mutation("collectives", lambda gm: [s for s in starts(gm) if list(s.users) == waits_of(s)])
def double_collective(gm: GraphModule, rng: Random, start: Node):
    """A collective runs a second time on its operand, and readers read the second result."""
    wait = waits_of(start)[0]
    again = insert(gm, wait, start.target, *start.args, **start.kwargs)
    second = insert(gm, again, wait.target, again)
    reread(wait, second)
    return [start, wait, again, second]


@mutation("collectives", lambda gm: [s for s in starts(gm) if face(s.args[0]) ==
          face(waits_of(s)[0])])
def reduce_twice(gm: GraphModule, rng: Random, start: Node):
    """An all-reduce is reduced once more."""
    wait = waits_of(start)[0]
    again = insert(gm, wait, start.target, wait, *start.args[1:])
    second = insert(gm, again, wait.target, again)
    reread(wait, second, again)
    return [start, wait, again, second]


@mutation("collectives")
def move_collective(gm: GraphModule, rng: Random):
    """A collective starts before the one ahead of it, with what it needs."""
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    begun = [n for n in calls(gm) if is_start(n)]

    def use(place: int):
        ahead, node = begun[place - 1], begun[place]
        needed, todo = {node}, [node]
        while todo:
            more = [a for a in todo.pop().all_input_nodes if a not in needed and order[a] >= order[ahead]]
            needed.update(more)
            todo += more
        if ahead in needed or not all(n is node or pure(n) for n in needed):
            return None
        for each in sorted(needed, key=order.__getitem__):
            ahead.prepend(each)
        return [node, ahead]
    return first(rng, range(1, len(begun)), use)


@mutation("collectives")
def another_input_cast(gm: GraphModule, rng: Random):
    """A collective moves its operand in another dtype, and the result is cast back."""
    import torch

    def use(start: Node):
        source, wait = start.args[0], waits_of(start)[0]
        dtype = source.meta["val"].dtype
        if not dtype.is_floating_point:
            return None
        users = [u.name for u in wait.users]
        short = insert(gm, start.prev, ATEN._to_copy.default, source,
                       dtype=torch.bfloat16 if dtype != torch.bfloat16 else torch.float32)
        with_argument(start, 0, short)
        for node in (start, wait):
            node.meta = {**node.meta, "val": node.meta["val"].to(short.meta["val"].dtype)}
        back = insert(gm, wait, ATEN._to_copy.default, wait, dtype=dtype)
        reread(wait, back)
        return [start, wait, short, back, *users]
    return first(rng, [s for s in starts(gm) if is_wait(waits_of(s)[0].target) and not s.kwargs], use)
