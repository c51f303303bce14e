"""Put a collective and the products beside it into one operator, and count the bytes that this adds and needs.

The operators take parts that lie one after another along dimension 0. Where the parts lie along another dimension,
such as the tokens of a batch of several sequences, they are copied into that layout before, and results back after.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.products.beside_collectives import BesideProducts
from workbench.torch_api.distributed.symmetric_memory import GATHER_MATMUL, MATMUL_SCATTER
from workbench.torch_api.ops import tensor_bytes, writes

aten = torch.ops.aten


def fuse(gm: GraphModule, together: Sequence[BesideProducts]) -> None:
    """One operator for each of these collectives with its products, in place. Every other value stays what it was."""
    mode = fake_mode_of(gm)
    for each in together:
        make = _Maker(gm.graph, each.start, mode)
        (_gather if each.collective.kind == "all_gather" else _scatter)(make, each)
    in_order(gm.graph)
    gm.recompile()


class _Maker(NodeMaker):
    """Adds nodes before a collective, in the layouts that the operators take."""

    def laid_out(self, node: Node, dim: int) -> Node:
        """The same tensor, with its slices along `dim` one after another in memory."""
        order = list(range(node.meta["val"].ndim))
        order.insert(0, order.pop(dim))
        if node.meta["val"].permute(order).is_contiguous():
            return node
        moved = self(aten.clone.default, self(aten.permute.default, node, order),
                     memory_format=torch.contiguous_format)
        return self(aten.permute.default, moved, [order.index(i) for i in range(len(order))])

    def like(self, node: Node, wanted: Node) -> Node:
        """`node` with the shape and the strides of `wanted`, which has as many elements in the same order."""
        value = wanted.meta["val"]
        if not node.meta["val"].is_contiguous():
            node = self(aten.clone.default, node, memory_format=torch.contiguous_format)
        return node if node.meta["val"].shape == value.shape else self(aten.view.default, node, list(value.shape))


def _gather(make: _Maker, each: BesideProducts) -> None:
    shard = make.laid_out(each.shard, each.dim)
    seconds = [product.args[1] for product in each.products]
    both = make(GATHER_MATMUL, shard, seconds, each.dim, each.collective.group, return_A=True)
    outs = make(operator.getitem, both, 1)
    made = [make.like(make(operator.getitem, outs, i), product) for i, product in enumerate(each.products)]
    each.whole.replace_all_uses_with(make.like(whole := make(operator.getitem, both, 0), each.whole))
    for product, new in zip(each.products, made, strict=True):
        product.replace_all_uses_with(new)
    _erase(*each.products, *whole.users, whole, each.whole)
    if whole not in both.users:  # only the products read it
        both.kwargs = {"return_A": False}
        both.meta["val"] = (None, both.meta["val"][1])


def _scatter(make: _Maker, each: BesideProducts) -> None:
    leading = list(each.whole.meta["val"].shape[:-1])
    firsts: list[Any] = [product.args[0] for product in each.products]
    seconds: list[Any] = [product.args[1] for product in each.products]
    first = firsts[0] if len(firsts) == 1 else make(aten.cat.default, firsts, 1)
    second = seconds[0] if len(seconds) == 1 else make(aten.cat.default, seconds, 0)
    if len(leading) > 1:
        first = make(aten.view.default, first, [*leading, first.meta["val"].shape[-1]])
    part = make(MATMUL_SCATTER, make.laid_out(first, each.dim), second, each.collective.reduce_op, each.dim,
                each.collective.group)
    each.shard.replace_all_uses_with(make.like(part, each.shard))
    _erase(each.shard)


def _erase(*nodes: Node) -> None:
    """Remove those that nobody reads, and then their inputs likewise; inputs of the graph and writes stay."""
    todo, gone = list(nodes), set[Node]()
    while todo:
        node = todo.pop()
        if node in gone or node.users or node.op != "call_function" or writes(node.target):
            continue
        todo += node.all_input_nodes
        node.graph.erase_node(node)
        gone.add(node)


def in_order(graph: Graph) -> None:
    """Each node after its inputs; otherwise the order stays."""
    seen: set[Node] = set()
    output = graph.output_node()
    for node in [n for n in graph.nodes if n.op != "placeholder"]:
        todo = [node]
        while todo:
            missing = [n for n in todo[-1].all_input_nodes if n not in seen and n.op != "placeholder"]
            if missing:
                todo += missing
            elif (ready := todo.pop()) not in seen:
                seen.add(ready)
                if ready is not output:
                    output.prepend(ready)


def added_bytes(each: BesideProducts) -> int:
    """The bytes that the operator reads and writes beyond those of the collective and the products; may be negative.

    Copies into the operator's layout and back, where parts do not lie one after another, less the copies that the
    collective needs for the same reason. A reduce-scatter reads its partial results again. Concatenated factors are
    written and read, and products that are not written one by one need not be summed.
    """
    whole, shard = (tensor_bytes(node.meta["val"]) for node in (each.whole, each.shard))
    apart = each.rows > 1
    products = [tensor_bytes(product.meta["val"]) for product in each.products]
    if each.collective.kind == "all_gather":
        return 2 * (shard + sum(products) - whole) if apart else 0
    factors: list[tuple[Any, ...]] = [product.args for product in each.products]
    firsts, seconds = (sum(tensor_bytes(pair[i].meta["val"]) for pair in factors) for i in (0, 1))
    added = whole + shard + (2 * firsts - 2 * whole if apart else 0)
    if len(products) > 1:
        added += 2 * (firsts + seconds) - 4 * sum(products[1:])
    return added


def workspace_bytes(each: BesideProducts) -> int:
    """Bytes of symmetric memory that the operator needs on each rank: torch's own requirement."""
    if each.collective.kind == "all_gather":
        return tensor_bytes(each.shard.meta["val"])
    return 2 * tensor_bytes(each.shard.meta["val"])
