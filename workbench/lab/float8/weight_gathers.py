"""Sharded weights that are gathered in float8: half of bfloat16's bytes.

All shards of a weight need one scale. Each rank finds the largest magnitude of each of its shards, and one all-reduce
of all of them, stacked, gives the weights' own. Replicas and tensor-parallel parts take no part: replicas are equal,
and a scaled product is local, so each part may have a scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.memory import Flow
from workbench.graph.read.nodes import kind_of, reachable
from workbench.lab.float8.linear import Product, turns, untransposed
from workbench.lab.float8.scaled_products import SCALED, Cast, erase_unread, inverse_scale, largest, scaled
from workbench.torch_api.ops import collective_kind, group_name_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class WeightGather:
    """The gather of a weight that only scaled products read. whole: the weight as they read it, before transposes.
    nodes: from the all-gather to `whole`, in node order.
    """

    gather: Node
    whole: Node
    nodes: tuple[Node, ...]


def weight_gathers(gm: GraphModule, products: Iterable[Product]) -> list[WeightGather]:
    """The gathers that can move float8 once these products, and no others, are scaled ones."""
    flow, chosen = Flow(gm), {product.node for product in products}
    rights = [node.args[1] for node in sorted(chosen)]
    weights = dict.fromkeys(untransposed(right)[0] for right in rights if isinstance(right, Node))
    result = []
    for whole in weights:
        nodes = _moved_by(whole)
        gathers = [n for n in nodes if _gathers(n)]
        readers = {user for node in nodes - {whole} for user in node.users}
        if len(gathers) == 1 and readers <= nodes and flow.parameters(gathers[0]) and _read_by(whole) <= chosen:
            result.append(WeightGather(gathers[0], whole, tuple(sorted(nodes))))
    return result


def _moved_by(whole: Node) -> set[Node]:
    """`whole`, its all-gather and what moves data between them; nothing where other operators lie between."""
    nodes = reachable([whole], lambda node: [] if _gathers(node) else node.all_input_nodes)
    moves = all(_gathers(node) or kind_of(node) in ("view", "copy", "wait", "bookkeeping") for node in nodes)
    return nodes if moves and all(node.op == "call_function" for node in nodes) else set()


def _gathers(node: Node) -> bool:
    return node.op == "call_function" and collective_kind(node.target) == "all_gather"


def _read_by(whole: Node) -> set[Node]:
    """The nodes that read a matrix, also through transposes."""
    matrices = reachable([whole], lambda node: filter(turns, node.users))
    return {user for matrix in matrices for user in matrix.users} - matrices


def _by_group(gathers: Iterable[WeightGather]) -> dict[str, list[WeightGather]]:
    groups: dict[str, list[WeightGather]] = {}
    for weight in gathers:
        groups.setdefault(group_name_of(weight.gather), []).append(weight)
    return groups


def expected_collectives(gm: GraphModule, gathers: Iterable[WeightGather]) -> list[Collective]:
    """The collectives of the graph once these gathers move float8."""
    collectives = {c.node: c for c in list_collectives(gm)}
    for weights in _by_group(gathers).values():
        for name in [weight.gather.name for weight in weights]:
            c = collectives[name]
            size = getattr(torch, c.dtype).itemsize
            collectives[name] = replace(c, dtype="uint8", bytes_in=c.bytes_in // size, bytes_out=c.bytes_out // size)
        first, size = collectives[weights[0].gather.name], 4 * len(weights)
        collectives[f"{first.node}, magnitudes"] = replace(
            first, kind="all_reduce", reduce_op="max", dtype="float32", shape=(len(weights),),
            bytes_in=size, bytes_out=size, node="the largest magnitudes", waits=())
    return list(collectives.values())


def gather_in_float8(gm: GraphModule, gathers: Iterable[WeightGather], casts: Mapping[Node, Cast]) -> None:
    """Cast the shards, and gather the bytes; one all-reduce of largest magnitudes for each process group.

    casts: the cast of each whole weight, which the gathered one replaces.
    """
    for group, weights in _by_group(gathers).items():
        agreed = _agreed(gm, group, [weight.gather for weight in weights])
        for i, weight in enumerate(weights):
            _gather_bytes(gm, weight, casts[weight.whole], agreed, i)


def _agreed(gm: GraphModule, group: str, gathers: list[Node]) -> Node:
    """The largest magnitudes of all weights, at the beginning of the graph."""
    mode, shards = fake_mode_of(gm), [gather.all_input_nodes[0] for gather in gathers]
    anchor = _hoisted(gm, shards)
    magnitudes = [largest(NodeMaker(gm.graph, anchor, mode, shard), shard, None) for shard in shards]
    make = NodeMaker(gm.graph, anchor, mode, shards[0])
    stacked = make(aten.cat.default, [make(aten.view.default, number, [1]) for number in magnitudes])
    return make(c10d.wait_tensor.default, make(c10d.all_reduce.default, stacked, "max", group))


def _gather_bytes(gm: GraphModule, weight: WeightGather, cast: Cast, agreed: Node, index: int) -> None:
    mode, dtype, shard = fake_mode_of(gm), cast.value.meta["val"].dtype, weight.gather.all_input_nodes[0]
    make = NodeMaker(gm.graph, weight.gather, mode)
    # computed for each weight: cuBLAS refuses a view, which may not begin at a multiple of 16 bytes
    inverse = inverse_scale(make, make(aten.select.int, agreed, 0, index), dtype)
    weight.gather.replace_input_with(shard, make(aten.view.dtype, scaled(make, shard, inverse, dtype), torch.uint8))
    for node in weight.nodes:
        values, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode or nullcontext():
            node.meta["val"] = node.target(*values, **keywords)  # type: ignore[operator]
        node.meta.pop("tensor_meta", None)
        node.meta.pop("eager_input_vals", None)
    whole = NodeMaker(gm.graph, weight.whole.next, mode, weight.whole)(aten.view.dtype, weight.whole, dtype)
    cast.value.replace_all_uses_with(whole)
    cast.inverse.replace_all_uses_with(inverse, delete_user_cb=lambda user: user.target is SCALED)
    erase_unread(cast.value)


def _hoisted(gm: GraphModule, nodes: list[Node]) -> Node:
    """Move these nodes and what they are computed from to the beginning; the first node behind them."""
    needed = reachable(nodes, lambda node: node.all_input_nodes)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    anchor = next(node for node in calls if node not in needed)
    for node in calls:
        if node in needed:
            anchor.prepend(node)
    return anchor
