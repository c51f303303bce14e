"""Mutation operators on arguments: tensors, lists and constants that an operator is given."""

from __future__ import annotations

import math
from random import Random

from mutants.edits import (
    ATEN,
    calls,
    earlier,
    face,
    first,
    floating,
    insert,
    mutation,
    pure,
    tensor_places,
    with_argument,
)
from torch.fx import GraphModule, Node

from workbench.torch_api.ops import op_name


@mutation("arguments", calls)
def swap_arguments(gm: GraphModule, rng: Random, node: Node):
    """Two tensor arguments of an operator that is not commutative are exchanged."""
    places = tensor_places(node)
    if len(places) < 2 or node.args[places[0]] is node.args[places[1]] or not pure(node) or op_name(
            node.target) in ("aten.add", "aten.mul", "aten.ne", "aten.eq", "aten.bitwise_and"):
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
        twins = [n for n in earlier(gm, node) if face(n) == face(node.args[place]) and n is not node.args[place]]
        if twins:
            with_argument(node, place, rng.choice(twins))
            return [node]
    return None


@mutation("arguments", calls)
def rewire_across_shapes(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes an earlier value of another shape."""
    for place in tensor_places(node):
        others = [n for n in earlier(gm, node) if face(n)[0] != face(node.args[place])[0]]  # type: ignore[index]
        if others:
            with_argument(node, place, rng.choice(others))
            return [node]
    return None


@mutation("arguments", calls)
def rewire_to_older(gm: GraphModule, rng: Random, node: Node):
    """One argument becomes the value from which it was computed, where shape and dtype are the same."""
    for place in tensor_places(node):
        older = [a for a in node.args[place].all_input_nodes if face(a) == face(node.args[place])]
        if older and older[0].op and not (pure(node) and node.args[place].op == "placeholder"):
            with_argument(node, place, older[0])
            return [node]
    return None


@mutation("arguments", calls)
def drop_argument(gm: GraphModule, rng: Random, node: Node):
    """The last argument is left out, so that its default counts."""
    schema = getattr(node.target, "_schema", None)
    last = len(node.args) - 1
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
    with_argument(node, place, zeros)
    return [node, zeros]


@mutation("arguments", calls)
def swap_in_list(gm: GraphModule, rng: Random, node: Node):
    """Two tensors of a list of the same shape are exchanged, as in a concatenation or a bucket."""
    for place, value in enumerate(node.args):
        if isinstance(value, list | tuple) and len(value) > 1 and all(isinstance(v, Node) for v in value):
            items = list(value)
            pairs = [(i, j) for j in range(len(items)) for i in range(j)
                     if face(items[i]) == face(items[j]) and items[i] is not items[j]]
            if pairs:
                i, j = rng.choice(pairs)
                items[i], items[j] = items[j], items[i]
                with_argument(node, place, items)
                return [node]
    return None


@mutation("arguments", calls)
def drop_from_list(gm: GraphModule, rng: Random, node: Node):
    """One item of a list of tensors or sizes is left out."""
    for place, value in enumerate(node.args):
        if isinstance(value, list | tuple) and len(value) > 1:
            items = list(value)
            del items[rng.randrange(len(items))]
            with_argument(node, place, items)
            return [node]
    return None


def _constants(node: Node, kind: type) -> list[int]:
    """The places of a node's arguments that are finite constants other than 0 of exactly this type."""
    return [i for i, v in enumerate(node.args) if type(v) is kind and math.isfinite(v) and v]


def _changed(gm: GraphModule, rng: Random, kind: type, change, *names: str):
    """One constant of one node becomes `change` of it; of the named operators, or of any."""
    def use(node: Node):
        places = _constants(node, kind)
        if not places:
            return None
        place = rng.choice(places)
        with_argument(node, place, change(node.args[place]))
        return [node]
    return first(rng, calls(gm, *names), use)


@mutation("constants")
def scale_constant(gm: GraphModule, rng: Random):
    """A floating-point constant is doubled."""
    return _changed(gm, rng, float, lambda v: 2 * v)


@mutation("constants")
def nudge_constant(gm: GraphModule, rng: Random):
    """A floating-point constant grows by a thousandth."""
    return _changed(gm, rng, float, lambda v: v * 1.001)


@mutation("constants")
def negate_constant(gm: GraphModule, rng: Random):
    """A floating-point constant changes its sign."""
    return _changed(gm, rng, float, lambda v: -v)


@mutation("constants")
def shift_integer(gm: GraphModule, rng: Random):
    """An integer argument grows by one: a dimension, a bound of a slice, an exponent, an item's number."""
    return _changed(gm, rng, int, lambda v: v + 1)


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


@mutation("constants", lambda gm: calls(gm, "operator.getitem"))
def take_another_item(gm: GraphModule, rng: Random, node: Node):
    """A reader of several results takes another one of the same shape and dtype."""
    source, item = node.args
    twins = [u for u in source.users if op_name(u.target) == "operator.getitem" and u.args[1] != item
             and face(u) == face(node)]
    if not twins:
        return None
    node.args = (source, rng.choice(twins).args[1])
    return [node]


@mutation("constants", calls)
def flip_flag(gm: GraphModule, rng: Random, node: Node):
    """A true argument becomes false, or the other way."""
    places = [i for i, v in enumerate(node.args) if isinstance(v, bool)]
    if not places:
        return None
    place = rng.choice(places)
    with_argument(node, place, not node.args[place])
    return [node]


@mutation("constants", lambda gm: calls(gm, "aten.view", "aten._unsafe_view", "aten.permute",
          "aten.expand", "aten.split_with_sizes"))
def permute_sizes(gm: GraphModule, rng: Random, node: Node):
    """Two sizes of a view, or two dimensions of a permutation, are exchanged."""
    if len(node.args) < 2 or not isinstance(node.args[1], list | tuple) or len(node.args[1]) < 2:
        return None
    sizes = list(node.args[1])
    pairs = [(i, j) for j in range(len(sizes)) for i in range(j) if sizes[i] != sizes[j]]
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    sizes[i], sizes[j] = sizes[j], sizes[i]
    with_argument(node, 1, sizes)
    return [node]


@mutation("constants", lambda gm: calls(gm, "aten.t", "aten.permute", "aten.transpose"))
def drop_transpose(gm: GraphModule, rng: Random, node: Node):
    """A transposition is left out where the shape stays the same, or where readers must refuse it."""
    names = [node.name, *(u.name for u in node.users)]
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    return names
