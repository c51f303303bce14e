"""Mutation operators on nodes: their arguments and constants; what they draw and write; their place and operator."""

import math
import operator
from random import Random

from mutants.edits import (
    ATEN,
    are_twins,
    drop,
    earlier,
    enter,
    exchanged,
    face,
    floating,
    inputs,
    mutation,
    one_of,
    order_of,
    pure,
    pure_floats,
    tensor_places,
    twins,
    with_argument,
    with_target,
)
from on_ranks import calls, insert, reread
from torch.fx import GraphModule, Node

from workbench.torch_api.ops import is_random, op_name, written_inputs

COMMUTATIVE = ("aten.add", "aten.mul", "aten.ne", "aten.eq", "aten.bitwise_and")
SIZED = ("aten.view", "aten._unsafe_view", "aten.permute", "aten.expand", "aten.split_with_sizes")


@mutation("arguments", calls)
def swap_arguments(gm: GraphModule, rng: Random, node: Node):
    """Two tensor arguments of an operator that is not commutative are exchanged."""
    places = tensor_places(node)
    if len(places) < 2 or node.args[places[0]] is node.args[places[1]] or not pure(node) or (
            op_name(node.target) in COMMUTATIVE):
        return None
    a, b = sorted(rng.sample(places, 2))
    one, other = node.args[a], node.args[b]
    with_argument(node, a, other)
    with_argument(node, b, one)
    return [node] if one is not other else None


@mutation("arguments", calls)
def rewire_argument(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes an earlier value of the same shape and dtype."""
    for place in rng.sample(tensor_places(node), len(tensor_places(node))):
        if others := twins(earlier(gm, node), node.args[place]):
            return with_argument(node, place, rng.choice(others))
    return None


@mutation("arguments", calls)
def rewire_across_shapes(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes an earlier value of another shape."""
    for place in tensor_places(node):
        others = [n for n in earlier(gm, node) if face(n)[0] != face(node.args[place])[0]]  # type: ignore[index]
        if others:
            return with_argument(node, place, rng.choice(others))
    return None


@mutation("arguments", calls)
def rewire_to_older(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes the value from which it was computed, where shape and dtype are the same."""
    for place in tensor_places(node):
        older = twins(node.args[place].all_input_nodes, node.args[place])
        if older:
            return with_argument(node, place, older[0])
    return None


@mutation("arguments", calls)
def drop_argument(gm: GraphModule, rng: Random, node: Node):
    """The last argument is left out, so that its default counts."""
    schema, last = getattr(node.target, "_schema", None), len(node.args) - 1
    if schema is None or last < 1 or not schema.arguments[last].has_default_value() or (
            schema.arguments[last].default_value == node.args[last]):
        return None
    node.args = node.args[:-1]
    return [node]


@mutation("arguments", calls)
def zero_argument(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes zeros of its shape and dtype."""
    places = [i for i in tensor_places(node) if floating(node.args[i])]
    if not places or not pure(node):
        return None
    place = rng.choice(places)
    zeros = insert(gm, node.prev, ATEN.zeros_like.default, node.args[place])
    return [*with_argument(node, place, zeros), zeros]


@mutation("arguments", calls)
def swap_in_list(gm: GraphModule, rng: Random, node: Node):
    """Two tensors of a list of the same shape are exchanged, as in a concatenation or a bucket."""
    for place, value in enumerate(node.args):
        nodes = isinstance(value, list | tuple) and all(isinstance(v, Node) for v in value)
        if nodes and (items := exchanged(rng, value, are_twins)):
            return with_argument(node, place, items)
    return None


@mutation("arguments", calls)
def drop_from_list(gm: GraphModule, rng: Random, node: Node):
    """One item of a list of tensors or sizes is left out."""
    for place, value in enumerate(node.args):
        if isinstance(value, list | tuple) and len(value) > 1:
            items = list(value)
            del items[rng.randrange(len(items))]
            return with_argument(node, place, items)
    return None


def _constants(kind: type):
    """The places of a node's finite constants of exactly this type, other than 0."""
    return lambda gm, node: [i for i, v in enumerate(node.args) if type(v) is kind and math.isfinite(v) and v]


for name, constant, change, about in (
    ("scale_constant", float, lambda v: 2 * v, "A floating-point constant is doubled."),
    ("nudge_constant", float, lambda v: v * 1.001, "A floating-point constant grows by a thousandth."),
    ("negate_constant", float, operator.neg, "A floating-point constant changes its sign."),
    ("shift_integer", int, lambda v: v + 1,
     "An integer argument grows by one: a dimension, a bound of a slice, an exponent, an item's number."),
):
    enter("constants", name, about, one_of(
        _constants(constant), lambda node, i, change=change: with_argument(node, i, change(node.args[i]))), calls)


@mutation("constants", lambda gm: calls(gm, "aten.slice"))
def shift_slice(gm: GraphModule, rng: Random, node: Node):
    """A slice of the same length starts one element earlier or later."""
    source, dim, start, end = (*node.args, *[None] * 4)[:4]
    size = source.meta["val"].shape[dim] if isinstance(dim, int) else None
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(size, int):
        return None
    end = min(end, size)
    by = 1 if end < size else -1 if start > 0 else 0
    node.args = (source, dim, start + by, end + by, *node.args[4:])
    return [node] if by else None


def _other_items(gm: GraphModule, node: Node) -> list:
    source, item = node.args
    return [u.args[1] for u in source.users if op_name(u.target) == "operator.getitem" and u.args[1] != item
            and face(u) == face(node)]


enter("constants", "take_another_item", "A reader of several results takes another one of the same shape and dtype.",
      one_of(_other_items, lambda node, item: with_argument(node, 1, item)),
      lambda gm: calls(gm, "operator.getitem"))
enter("constants", "flip_flag", "A true argument becomes false, or the other way.",
      one_of(lambda gm, node: [i for i, v in enumerate(node.args) if isinstance(v, bool)],
             lambda node, i: with_argument(node, i, not node.args[i])), calls)


@mutation("constants", lambda gm: calls(gm, *SIZED))
def permute_sizes(gm: GraphModule, rng: Random, node: Node):
    """Two sizes of a view, or two dimensions of a permutation, are exchanged."""
    sizes = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], list | tuple) else []
    changed = exchanged(rng, sizes, operator.ne)
    return with_argument(node, 1, changed) if changed else None


enter("constants", "drop_transpose",
      "A transposition is left out where the shape stays the same, or where readers must refuse it.",
      lambda gm, rng, node: drop(node, node.args[0]), lambda gm: calls(gm, "aten.t", "aten.permute", "aten.transpose"))


IN_PLACE = tuple(f"aten.{name}" for name in ("add", "mul", "sub", "div", "neg", "exp", "silu", "rsqrt"))
FILLED = tuple(f"aten.{name}" for name in ("full", "zeros", "new_zeros", "zeros_like", "full_like", "scalar_tensor"))


def _draws(gm: GraphModule) -> list[Node]:
    return [n for n in calls(gm) if is_random(n)]


def _masks(gm: GraphModule) -> list[Node]:
    """What is taken of drawn tuples."""
    return [u for n in _draws(gm) for u in n.users if op_name(u.target) == "operator.getitem"]


@mutation("random numbers", _draws)
def redraw(gm: GraphModule, rng: Random, node: Node):
    """A value that was drawn is drawn again for its last reader, as in a recomputation with another random state."""
    users = [u for u in node.users if u.op == "call_function"]
    if not users:
        return None
    again = insert(gm, node, node.target, *node.args, **node.kwargs)
    users[-1].replace_input_with(node, again)
    return [node, again, users[-1]]


@mutation("random numbers", lambda gm: [n for n in pure_floats(gm) if n.users])
def draw_another(gm: GraphModule, rng: Random, node: Node):
    """A drawn value is replaced by a new draw of the same shape, such as a recomputed dropout mask."""
    fresh = insert(gm, node, ATEN.rand_like.default, node)
    reread(node, fresh)
    return [node, fresh]


@mutation("random numbers", _masks)
def swap_draws(gm: GraphModule, rng: Random, node: Node):
    """Readers of one drawn mask read that of another draw of the same shape."""
    order = order_of(gm)
    places = [(mask, user) for mask in twins(_masks(gm), node) for user in node.users if order[user] > order[mask]]
    if not places:
        return None
    other, user = rng.choice(places)
    user.replace_input_with(node, other)
    return [node, other, user]


@mutation("random numbers", pure_floats)
def draw_uselessly(gm: GraphModule, rng: Random, node: Node):
    """Random numbers are drawn that nothing reads, so that later draws get others."""
    return [node, insert(gm, node, ATEN.rand_like.default, node)]


@mutation("random numbers", lambda gm: [u for n in _draws(gm) for u in (n, *n.users) if face(u) and u.users])
def draw_constant(gm: GraphModule, rng: Random, node: Node):
    """A drawn value is replaced by a constant."""
    ones = insert(gm, node, ATEN.ones_like.default, node)
    return [node, ones, *reread(node, ones)]


def _readers(gm: GraphModule, node: Node) -> list[Node]:
    """The operators that read a node, in node order."""
    return sorted((u for u in node.users if u.op == "call_function"), key=order_of(gm).__getitem__)


@mutation("writes", lambda gm: [n for n in inputs(gm) if floating(n)])
def write_input(gm: GraphModule, rng: Random, node: Node):
    """An input of the step is overwritten behind its last reader."""
    readers = _readers(gm, node)
    return [node, insert(gm, readers[-1], ATEN.mul_.Tensor, node, 2.0)] if readers else None


@mutation("writes", pure_floats)
def write_value(gm: GraphModule, rng: Random, node: Node):
    """A value is overwritten between two of its readers."""
    readers = _readers(gm, node)
    if len(readers) < 2:
        return None
    return [node, insert(gm, readers[0], ATEN.mul_.Tensor, node, 2.0), readers[-1]]


@mutation("writes", lambda gm: calls(gm, *IN_PLACE))
def write_in_place(gm: GraphModule, rng: Random, node: Node):
    """An operator writes its result over its first input, as fusion in place does."""
    packet = getattr(ATEN, op_name(node.target).removeprefix("aten.") + "_", None)
    overload = getattr(packet, node.target._overloadname, None)
    if overload is None or face(node.args[0]) != face(node):
        return None
    return [*with_target(node, overload), node.args[0]]


@mutation("writes", lambda gm: [n for n in calls(gm) if written_inputs(n)])
def drop_write(gm: GraphModule, rng: Random, node: Node):
    """A write is dropped, and its readers read the memory as it was."""
    target = written_inputs(node)[0]
    if node.users and face(target) != face(node):
        return None
    return [*drop(node, target), target]


@mutation("writes", lambda gm: calls(gm, *FILLED))
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


@mutation("writes", pure_floats)
def steal_memory(gm: GraphModule, rng: Random, node: Node):
    """A result is written into the memory of an earlier value that is still read."""
    order = order_of(gm)
    victims = [v for v in twins(calls(gm), node) if pure(v) and order[v] < order[node]
               and any(order[u] > order[node] for u in v.users)]
    if not victims:
        return None
    victim = rng.choice(victims)
    return [node, victim, insert(gm, node, ATEN.copy_.default, victim, node)]


UNARY = ("neg", "abs", "exp", "sigmoid", "tanh", "sin", "cos", "relu", "silu", "rsqrt", "sqrt", "log", "square")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor")
TWINS = {"aten.ge": "gt", "aten.gt": "ge", "aten.lt": "le", "aten.le": "lt", "aten.ne": "eq", "aten.eq": "ne",
         "aten.sum": "mean", "aten.mean": "sum", "aten.amax": "amin", "aten.silu_backward": "sigmoid_backward",
         "aten._log_softmax": "_softmax", "aten.bitwise_and": "bitwise_or", "aten.pow": "mul"}
OVERLOADS = {"dim_IntList": "dim", "dim": "dim_IntList", "Tensor_Scalar": "Scalar"}
"""What a twin may call the overload of the same arguments."""
SAME_VALUE = ("aten.alias", "aten.detach", "aten.view")


def _drops(node: Node) -> bool:
    """Whether it shows where the node is left out."""
    return pure(node) and op_name(node.target) not in SAME_VALUE


def _of_another_face(gm: GraphModule, node: Node) -> list[Node]:
    return [n for n in earlier(gm, node) if face(n) != face(node)] if pure(node) and face(node) else []


def _strangers(gm: GraphModule, node: Node) -> list[Node]:
    others = twins(earlier(gm, node), node) if pure(node) and node.users else []
    return [n for n in others if n not in node.all_input_nodes]


for name, options, change, about in (
    ("drop_node", lambda gm, node: twins(node.all_input_nodes, node) if _drops(node) else [], drop,
     "A node is dropped, and its readers read one of its inputs of the same shape and dtype."),
    ("drop_and_leave_readers", _of_another_face, drop,
     "A node is dropped, and its readers read an earlier value of another shape or dtype."),
    ("replace_by_stranger", _strangers, lambda node, other: [node, *reread(node, other)],
     "All readers of a node read an earlier, unrelated value of the same shape and dtype."),
):
    enter("nodes", name, about, one_of(options, change), calls)


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
    if not pure(node) or place is None or op_name(node.target) in SAME_VALUE:
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
    order = order_of(gm)
    reader = min((u for u in node.users if u.op == "call_function"), key=order.__getitem__, default=None)
    if reader is None or order[reader] < order[node] + 3:
        return None
    reader.prepend(node)
    return [node]


def _unary(gm: GraphModule, node: Node) -> list:
    return [getattr(ATEN, name).default for name in UNARY if f"aten.{name}" != op_name(node.target)]


def _binary(gm: GraphModule, node: Node) -> list:
    name = str(node.target).removeprefix("aten.")
    if name not in BINARY or node.kwargs or not floating(node):
        return []
    return [getattr(getattr(ATEN, b.split(".")[0]), b.split(".")[1]) for b in BINARY if b != name]


enter("operators", "retarget_unary", "An operator of one tensor becomes another one, such as silu for gelu's place.",
      one_of(_unary, with_target),
      lambda gm: [n for n in calls(gm, *(f"aten.{u}" for u in UNARY)) if len(n.args) == 1])
enter("operators", "retarget_binary", "A sum becomes a difference, a product or a quotient, or the other way.",
      one_of(_binary, with_target), calls)


@mutation("operators", lambda gm: calls(gm, *TWINS))
def retarget_twin(gm: GraphModule, rng: Random, node: Node):
    """An operator becomes its neighbour with the same arguments: ge for gt, sum for mean, amax for amin."""
    packet, overload = getattr(ATEN, TWINS[op_name(node.target)]), node.target._overloadname
    names = [name for name in packet.overloads() if name in (overload, OVERLOADS.get(overload))]
    return with_target(node, getattr(packet, names[0])) if names else None
