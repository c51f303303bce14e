"""Sharded weights that are gathered in float8: half of bfloat16's bytes.

All shards of a weight need one scale. Each rank finds the largest magnitude of each of its shards, and one all-reduce
of all of them, stacked, gives the weights' own. Replicas and tensor-parallel parts take no part: replicas are equal,
and a scaled product is local, so each part may have a scale of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from workbench.graph.products.float8 import Cast, erase_unread, inverse_scale, largest, scaled
from workbench.graph.products.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.read.memory import Flow
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.ops import collective_kind, group_name_of

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class WeightGather:
    """A cast of a gathered weight that nothing reads in another type. nodes: from the all-gather to the cast's base."""

    cast: Cast
    gather: Node
    nodes: tuple[Node, ...]


def weight_gathers(gm: GraphModule, casts: Iterable[Cast]) -> list[WeightGather]:
    """The casts of gathered weights whose gathers can move float8."""
    flow = Flow(gm)
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    found = []
    for cast in casts:
        nodes, gathers, todo = set[Node](), set[Node](), [cast.base]
        while todo:
            node = todo.pop()
            if node in nodes:
                continue
            nodes.add(node)
            if node.op == "call_function" and collective_kind(node.target) == "all_gather":
                gathers.add(node)
            elif node.op == "call_function" and kind_of(node) in ("view", "copy", "wait", "bookkeeping"):
                todo += node.all_input_nodes
            else:
                gathers.clear()
                break
        alone = all(user in nodes or (node is cast.base and user in cast.reads) for node in nodes for user in node.users)
        if len(gathers) == 1 and alone and flow.parameters(gather := gathers.pop()):
            found.append(WeightGather(cast, gather, tuple(sorted(nodes, key=place.__getitem__))))
    return found


def gather_in_float8(gm: GraphModule, gathers: Iterable[WeightGather]) -> None:
    """Cast the shards, and gather the bytes; one all-reduce of largest magnitudes for each process group."""
    groups: dict[str, list[WeightGather]] = {}
    for each in gathers:
        groups.setdefault(group_name_of(each.gather), []).append(each)
    for name, same in groups.items():
        _agree_and_gather(gm, name, same)
    gm.graph.lint()
    gm.recompile()


def _agree_and_gather(gm: GraphModule, group: str, gathers: list[WeightGather]) -> None:
    mode, dtype = fake_mode_of(gm), gathers[0].cast.value.meta["val"].dtype
    shards = [each.gather.all_input_nodes[0] for each in gathers]
    anchor = _hoisted(gm, shards)
    each_largest = [largest(NodeMaker(gm.graph, anchor, mode, shard), shard, None) for shard in shards]
    make = NodeMaker(gm.graph, anchor, mode, shards[0])
    stacked = make(aten.cat.default, [make(aten.view.default, each, [1]) for each in each_largest])
    agreed = make(c10d.wait_tensor.default, make(c10d.all_reduce.default, stacked, "max", group))
    inverses = inverse_scale(make, agreed, dtype)
    for i, (each, shard) in enumerate(zip(gathers, shards, strict=True)):
        make = NodeMaker(gm.graph, each.gather, mode)
        inverse = make(aten.select.int, inverses, 0, i)
        value, _ = scaled(make, shard, inverse, dtype)
        each.gather.replace_input_with(shard, make(aten.view.dtype, value, torch.uint8))
        for node in each.nodes:
            values, keywords = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode:
                node.meta["val"] = node.target(*values, **keywords)  # type: ignore[operator]
            node.meta.pop("tensor_meta", None)
        base, old = each.cast.base, each.cast
        whole = NodeMaker(gm.graph, base.next, mode, base)(aten.view.dtype, base, dtype)
        old.value.replace_all_uses_with(whole)
        old.inverse.replace_all_uses_with(inverse, delete_user_cb=lambda user, old=old: user.target is
                                          not aten.reciprocal.default)
        erase_unread(old.value)


def _hoisted(gm: GraphModule, nodes: list[Node]) -> Node:
    """Move these nodes and what they are computed from to the beginning; the first node behind them."""
    needed, todo = set[Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    anchor = next(node for node in calls if node not in needed)
    for node in calls:
        if node in needed:
            anchor.prepend(node)
    return anchor
