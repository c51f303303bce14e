"""Mutation operators between ranks: waits, collectives, their groups and reductions."""

from random import Random

import torch
from mutants.edits import (
    ATEN,
    are_twins,
    drop,
    enter,
    face,
    is_start,
    mutation,
    one_of,
    order_of,
    pure,
    starts,
    twins,
    with_argument,
)
from on_ranks import calls, insert, reread
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import waits_of
from workbench.torch_api.ops import collective_kind, is_wait, multiplies


def _waits(gm: GraphModule) -> list[Node]:
    return calls(gm, "_c10d_functional.wait_tensor")


def _lost(gm: GraphModule, rng: Random, node: Node):
    start = node.args[0]
    name, *readers = drop(node, start)
    return [name, start, *readers]


def _read_early(node: Node, user: Node):
    user.replace_input_with(node, node.args[0])
    return [node, node.args[0], user]


def _moved_up(gm: GraphModule, rng: Random, node: Node):
    if node.prev is node.args[0]:
        return None
    node.args[0].append(node)
    return [node]


def _waited_twice(gm: GraphModule, rng: Random, node: Node):
    again = insert(gm, node, node.target, node)
    reread(node, again)
    return [node, again]


def _crossed(gm: GraphModule, node: Node) -> list[Node]:
    order = order_of(gm)
    return [w for w in twins(_waits(gm), node) if order[w.args[0]] < order[node] and order[node.args[0]] < order[w]]


def _exchange(node: Node, other: Node):
    node.args, other.args = other.args, node.args
    return [node, other]


for name, edit, about in (
    ("lose_wait", _lost, "A wait is lost, and its readers read the running collective."),
    ("read_before_wait", one_of(lambda gm, node: node.users, _read_early),
     "One reader reads the running collective in the place of its wait."),
    ("wait_early", _moved_up, "A wait is moved to just behind its collective, so that nothing runs beside it."),
    ("wait_twice", _waited_twice, "A wait is waited for once more, and readers read the second wait."),
    ("wait_for_nothing", lambda gm, rng, node: [node, insert(gm, node, node.target, node.args[0])],
     "A collective gets a second wait that nothing reads."),
    ("wait_for_another", one_of(_crossed, _exchange),
     "A wait waits for another collective of the same shape, whose wait waits for the first."),
):
    enter("waits", name, about, edit, _waits)


def _given(name: str, change):
    """An edit that makes `change(gm, rng, old)` of the argument `name` of what sends."""
    def edit(gm: GraphModule, rng: Random, node: Node):
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        place = names.index(name) if name in names else len(node.args)
        new = change(gm, rng, node.args[place]) if place < len(node.args) else None
        return with_argument(node, place, new) if new is not None else None

    return edit


def _another_group(gm: GraphModule, rng: Random, old):
    names = ["0", *facts_of(gm).groups.values()] if isinstance(old, str) else []
    return next((name for name in names if name != old), None)


def _another_reduction(gm: GraphModule, rng: Random, old):
    return rng.choice([reduction for reduction in ("sum", "avg", "max") if reduction != old])


for kind, name, argument, change, about in (
    ("groups", "another_group", "group_name", _another_group,
     "A collective runs over another process group: that of all ranks, or of another axis."),
    ("groups", "unknown_group", "group_name", lambda gm, rng, old: "none such" if isinstance(old, str) else None,
     "A collective runs over a process group that does not exist."),
    ("groups", "another_group_size", "group_size", lambda gm, rng, old: old * 2 if isinstance(old, int) else None,
     "A collective is told another number of ranks."),
    ("collectives", "another_reduction", "reduce_op", _another_reduction,
     "A sum between ranks becomes an average, a maximum or the other way."),
):
    enter(kind, name, about, _given(argument, change),
          lambda gm: [n for n in calls(gm) if is_start(n) or multiplies(n.target)])


def _shard(start: Node) -> Node | None:
    """The node of a collective's operand that reads an input of the step, where views alone lie between them."""
    node = start.args[0]
    while isinstance(node, Node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        if node.all_input_nodes[0].op == "placeholder":
            return node
        node = node.all_input_nodes[0]
    return None


def _shards(gm: GraphModule) -> dict[Node, Node]:
    return {start: shard for start in starts(gm) if (shard := _shard(start)) is not None}


@mutation("collectives", _shards)
def exchange_operands(gm: GraphModule, rng: Random, node: Node):
    """Two collectives of the same kind and shape exchange their operands."""
    shards = _shards(gm)
    mine = shards[node]
    others = [shard for start, shard in shards.items() if start.target is node.target and shard is not mine
              and are_twins(shard.args[0], mine.args[0])]
    if not others:
        return None
    theirs = rng.choice(others)
    one, two = mine.args[0], theirs.args[0]
    with_argument(mine, 0, two)
    with_argument(theirs, 0, one)
    return [node, mine, theirs, *(start for start, shard in shards.items() if shard is theirs)]


def _earlier_waits(gm: GraphModule, node: Node) -> list[Node]:
    order = order_of(gm)
    return [w for w in twins(_waits(gm), node) if order[w] < order[node]] if node.users else []


enter("collectives", "take_another_result",
      "The readers of a collective's result read that of an earlier collective of the same shape.",
      one_of(_earlier_waits, lambda node, other: [node, other, *reread(node, other)]), _waits)


def _waited(gm: GraphModule) -> list[Node]:
    """The collectives that only their one wait reads."""
    return [start for start in starts(gm) if list(start.users) == waits_of(start)]


@mutation("collectives", _waited)
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
    name, *readers = drop(wait, local)
    gm.graph.erase_node(start)
    return [start.name, name, local, *readers]


@mutation("collectives", _waited)
def double_collective(gm: GraphModule, rng: Random, start: Node):
    """A collective runs a second time on its operand, and readers read the second result."""
    wait = waits_of(start)[0]
    again = insert(gm, wait, start.target, *start.args, **start.kwargs)
    second = insert(gm, again, wait.target, again)
    reread(wait, second)
    return [start, wait, again, second]


@mutation("collectives", lambda gm: [s for s in starts(gm) if face(s.args[0]) == face(waits_of(s)[0])])
def reduce_twice(gm: GraphModule, rng: Random, start: Node):
    """An all-reduce is reduced once more."""
    wait = waits_of(start)[0]
    again = insert(gm, wait, start.target, wait, *start.args[1:])
    second = insert(gm, again, wait.target, again)
    reread(wait, second, again)
    return [start, wait, again, second]


def _launches(gm: GraphModule) -> list[Node]:
    return [n for n in calls(gm) if is_start(n)]


@mutation("collectives", lambda gm: range(1, len(_launches(gm))))
def move_collective(gm: GraphModule, rng: Random, place: int):
    """A collective starts before the one ahead of it, with what it needs."""
    order = order_of(gm)
    ahead, node = _launches(gm)[place - 1:place + 1]
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


@mutation("collectives", lambda gm: [s for s in starts(gm) if is_wait(waits_of(s)[0].target) and not s.kwargs])
def another_input_cast(gm: GraphModule, rng: Random, start: Node):
    """A collective moves its operand in another dtype, and the result is cast back."""
    source, wait = start.args[0], waits_of(start)[0]
    dtype = source.meta["val"].dtype
    if not dtype.is_floating_point:
        return None
    short = insert(gm, start.prev, ATEN._to_copy.default, source,
                   dtype=torch.bfloat16 if dtype != torch.bfloat16 else torch.float32)
    with_argument(start, 0, short)
    for node in (start, wait):
        node.meta = {**node.meta, "val": node.meta["val"].to(short.meta["val"].dtype)}
    back = insert(gm, wait, ATEN._to_copy.default, wait, dtype=dtype)
    return [start, wait, short, back, *reread(wait, back)]
