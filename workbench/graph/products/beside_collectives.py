"""Tensor-parallel collectives beside matrix products: all-gathers that products read, and reduce-scatters of products.

    all-gather -> matmul        one operator can multiply the parts that have arrived
    matmul -> reduce-scatter    one operator can send the parts that are computed
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.collectives import Collective, list_collectives, waits_of
from workbench.torch_api.ops import is_symbolic, op_name

_AXIS = "tp"
_VIEWS = ("aten.view", "aten._unsafe_view", "aten.reshape")
_SPLITS = ("aten.split", "aten.split_with_sizes")
_TURNED = ("aten.t", "aten.transpose", "aten.permute")
_PRODUCT = torch.ops.aten.mm.default


@dataclass(frozen=True)
class BesideProducts:
    """A collective and the products that read its result, or whose sum it scatters.

    whole, shard: the value on all ranks together, and this rank's part along `dim`. missed: why the collective cannot
    share an operator with its products; "" if it can.
    """

    collective: Collective
    start: Node
    whole: Node
    shard: Node
    dim: int
    products: tuple[Node, ...]
    missed: str = ""

    @property
    def rows(self) -> int:
        """Number of tensors that lie between two neighbouring parts in memory; 1 if the parts lie one after another."""
        return math.prod(self.whole.meta["val"].shape[: self.dim])


def beside_products(gm: GraphModule) -> list[BesideProducts]:
    """The all-gathers and reduce-scatters of the tp axis with products beside them, in node order."""
    found = []
    named = {node.name: node for node in gm.graph.nodes}
    for c in list_collectives(gm):
        if c.axis == _AXIS and c.group_size > 1 and c.node not in c.waits:
            each = {"all_gather": _gather, "reduce_scatter": _scatter}.get(c.kind)
            if each is not None and (one := each(c, named[c.node])) is not None:
                found.append(one)
    return found


def _gather(c: Collective, start: Node) -> BesideProducts | None:
    """An all-gather, if a product reads its result. Products that need it for their second factor are left out."""
    waits = waits_of(start)
    shard = start.args[0]
    if len(waits) != 1 or not isinstance(shard, Node):
        return None
    whole, dim = _joined(waits[0], c.group_size)
    first, other = [], 0
    for node in _same_rows(whole):
        for user in node.users:
            if user.target is _PRODUCT and user.args[0] is node:
                first.append(user)
            other += user.target is _PRODUCT or op_name(user.target) in _TURNED
    after = _after(whole)
    products = tuple(p for p in dict.fromkeys(first) if p.args[1] not in after and p.args[1] is not whole)
    if not (products or other):
        return None
    shape = whole.meta["val"].shape
    missed = ""
    if is_symbolic(whole.meta["val"]):
        missed = "its size is known only during the step"
    elif not first:
        missed = "products read its result transposed or as their second factor only, so all of it must be there"
    elif not products:
        missed = "the second factor depends on the result of the all-gather"
    elif dim == len(shape) - 1:
        missed = "it gathers the dimension that the products sum over"
    return BesideProducts(c, start, whole, shard, dim, products, missed)


def _scatter(c: Collective, start: Node) -> BesideProducts | None:
    """A reduce-scatter, if its input is a product or a sum with at least one."""
    waits, given = waits_of(start), start.args[0]
    if len(waits) != 1 or not isinstance(given, Node):
        return None
    whole, dim = _cut(given, c.group_size)
    terms = list(_terms(whole))
    products = [node for node in map(_through_views, terms) if node.target is _PRODUCT]
    if not products:
        return None
    missed = ""
    if is_symbolic(whole.meta["val"]):
        missed = "its size is known only during the step"
    elif len(products) < len(terms):
        missed = f"it scatters a sum of {len(terms)} terms, and {len(terms) - len(products)} of them are no products"
    elif c.reduce_op not in ("sum", "avg"):
        missed = f"it reduces by {c.reduce_op}, and the operator only by sum and avg"
    elif dim == whole.meta["val"].ndim - 1:
        missed = "it scatters the columns of the product"
    elif any(p.meta["val"].shape[-1] != whole.meta["val"].shape[-1] for p in products):
        missed = "a view between product and reduce-scatter changes the rows"
    elif read := _leak(start, products):
        missed = f"{read.name} is read by others, too, and the operator does not return it"
    return BesideProducts(c, start, whole, waits[0], dim, tuple(products), missed)


def _joined(wait: Node, parts: int) -> tuple[Node, int]:
    """The gathered value and its dimension: the wait's own, or those of a cat of its parts along another one."""
    items = [item for user in wait.users for item in (user.users if op_name(user.target) in _SPLITS else [user])]
    cats = {user for item in items for user in item.users}
    if len(items) == parts and len(cats) == 1 and _source_of(cat := next(iter(cats)), parts) == (wait, 0):
        return cat, _dim_of(cat)
    return wait, 0


def _cut(given: Node, parts: int) -> tuple[Node, int]:
    """The value that is scattered and its dimension: the input itself, or what it is a cat of parts of."""
    source = _source_of(given, parts)
    return source if source is not None and _dim_of(given) == 0 else (given, 0)


def _source_of(cat: Node, parts: int) -> tuple[Node, int] | None:
    """The value that a cat of its equal parts is made from, and the dimension that they were cut along."""
    if cat.target is not torch.ops.aten.cat.default:
        return None
    pieces = [_piece(node) for node in cat.args[0] if isinstance(node, Node)]  # type: ignore[union-attr]
    sources, places = {piece[:2] for piece in pieces if piece}, [piece[2] for piece in pieces if piece]
    if len(sources) != 1 or len(places) != parts or len(pieces) != parts or places != sorted(set(places)):
        return None
    source, dim = next(iter(sources))
    sizes = {node.meta["val"].shape[dim] * parts for node in cat.args[0]}  # type: ignore[union-attr]
    return (source, dim) if sizes == {source.meta["val"].shape[dim]} else None


def _piece(node: Node) -> tuple[Node, int, int] | None:
    """Of a part of a tensor: the tensor, the dimension that it is cut along, and the part's place; else None."""
    args: tuple[Any, ...] = node.args
    if op_name(node.target) == "aten.slice" and len(args) > 3:
        return args[0], args[1] % args[0].meta["val"].ndim, args[2]
    split = args[0] if node.target is operator.getitem else None
    if isinstance(split, Node) and op_name(split.target) in _SPLITS:
        source: Any = split.args[0]
        dim: Any = split.args[2] if len(split.args) > 2 else 0
        return source, dim % source.meta["val"].ndim, args[1]
    return None


def _dim_of(cat: Node) -> int:
    dim: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return int(dim % cat.meta["val"].ndim)


def _same_rows(node: Node) -> Iterator[Node]:
    """A value and its views that keep the last dimension."""
    yield node
    for user in node.users:
        if _shows(user) and user.meta["val"].shape[-1:] == node.meta["val"].shape[-1:]:
            yield from _same_rows(user)


def _through_views(node: Node) -> Node:
    while _shows(node):
        node = node.all_input_nodes[0]
    return node


def _shows(node: Node) -> bool:
    """Whether the node is a view of all elements of its input in their order; a slice of everything is one."""
    if op_name(node.target) == "aten.slice":
        return bool(node.meta["val"].shape == node.all_input_nodes[0].meta["val"].shape)
    return op_name(node.target) in _VIEWS


def _terms(node: Node) -> Iterator[Node]:
    """The terms of a sum, in order; a value that is no sum is its own term."""
    plain = _through_views(node)
    given = [n for n in plain.args if isinstance(n, Node)]
    if op_name(plain.target) == "aten.add" and len(given) == 2 and not plain.kwargs:
        for term in given:
            yield from _terms(term)
    else:
        yield node


def _leak(start: Node, products: list[Node]) -> Node | None:
    """A product, or a node between the products and the reduce-scatter, that something else reads, too."""
    inner, todo = {start}, list(start.all_input_nodes)
    for node in todo:
        if node not in inner:
            inner.add(node)
            todo += [] if node in products else node.all_input_nodes
    return next((node for node in inner - {start} if not inner.issuperset(node.users)), None)


def _after(node: Node) -> set[Node]:
    """The nodes that depend on this one."""
    seen: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return seen
