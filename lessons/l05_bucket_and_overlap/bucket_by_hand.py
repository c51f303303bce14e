"""Bucketing by hand: concatenate the shards, gather once, split; gradients likewise.

torch's scheduler, which the pass `transformer_block_bucketing` calls, does the same and also starts the bucket early.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import networkx as nx
import torch
from torch.fx import Graph, GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.read.nodes import module_path

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
GATHER, SCATTER = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default


def bucket(gm: GraphModule, *modules: str) -> None:
    """Merge the all-gathers of these modules into one, and their reduce-scatters into another, in place.

    modules: how their paths begin. The new nodes belong to the module of the bucket's first or last collective.
    """
    for target, merge in ((GATHER, bucket_gathers), (SCATTER, bucket_scatters)):
        collectives = gm.graph.find_nodes(op="call_function", target=target)
        chosen = [node for node in collectives if module_path(node).startswith(modules)]
        if len(chosen) > 1:
            merge(gm, chosen)


def bucket_gathers(gm: GraphModule, gathers: Sequence[Node]) -> None:
    """Replace all-gathers of one group and dtype by one all-gather, in place. Two weights, on 2 ranks:

    before:
        gather_a = all_gather_into_tensor(shard_a, 2, group)    # shard [4, 8], gathered [8, 8]
        whole_a = wait_tensor(gather_a)
        gather_b = all_gather_into_tensor(shard_b, 2, group)    # shard [2, 8], gathered [4, 8]
        whole_b = wait_tensor(gather_b)
    after:
        bucket = cat([view(shard_a, [-1]), view(shard_b, [-1])])            # [48]
        gathered = wait_tensor(all_gather_into_tensor(bucket, 2, group))    # [96]
        rows = view(gathered, [2, -1])                                      # a row is what one rank sent
        part_a, part_b = split_with_sizes(rows, [32, 16], 1)                # [2, 32] and [2, 16]
        whole_a = view(clone(part_a), [8, 8])                               # the copy that a bucket costs
        whole_b = view(clone(part_b), [4, 8])
    """
    ranks, group = _in_common(gathers)[1:]
    make = NodeMaker(gm.graph, before=gathers[0], mode=fake_mode_of(gm))
    shards = [gather.all_input_nodes[0] for gather in gathers]
    flat = [_reshaped(make, shard, [-1]) for shard in shards]
    gather = make(GATHER, make(aten.cat.default, flat), ranks, group)
    rows = make(aten.view.default, make(c10d.wait_tensor.default, gather), [ranks, -1])
    _split(gm, make, rows, 1, gathers, [shard.meta["val"].numel() for shard in shards])


def bucket_scatters(gm: GraphModule, scatters: Sequence[Node]) -> None:
    """Replace reduce-scatters of one operation, group and dtype by one, in place. Two gradients, on 2 ranks:

    before:
        scatter_a = reduce_scatter_tensor(grad_a, "avg", 2, group)    # gradient [8, 8], kept [4, 8]
        kept_a = wait_tensor(scatter_a)
        scatter_b = reduce_scatter_tensor(grad_b, "avg", 2, group)    # gradient [4, 8], kept [2, 8]
        kept_b = wait_tensor(scatter_b)
    after:
        rows = cat([view(grad_a, [2, -1]), view(grad_b, [2, -1])], 1)                   # a row is what one rank keeps
        kept = wait_tensor(reduce_scatter_tensor(view(rows, [-1]), "avg", 2, group))    # [48]
        part_a, part_b = split_with_sizes(kept, [32, 16])
        kept_a, kept_b = view(part_a, [4, 8]), view(part_b, [2, 8])
    """
    operation, ranks, group = _in_common(scatters)[1:]
    make = NodeMaker(gm.graph, before=scatters[-1], mode=fake_mode_of(gm))
    rows = [_reshaped(make, scatter.all_input_nodes[0], [ranks, -1]) for scatter in scatters]
    bucket = make(aten.view.default, make(aten.cat.default, rows, 1), [-1])
    scatter = make(SCATTER, bucket, operation, ranks, group)
    kept = make(c10d.wait_tensor.default, scatter)
    _split(gm, make, kept, 0, scatters, [scatter.meta["val"].numel() for scatter in scatters])


def _split(gm: GraphModule, make: NodeMaker, merged: Node, dim: int, old: Sequence[Node], sizes: list[int]) -> None:
    """The readers of each old collective's wait read a part of the merged result instead."""
    parts = make(aten.split_with_sizes.default, merged, sizes, dim)
    for i, collective in enumerate(old):
        (wait,) = collective.users
        part = make(operator.getitem, parts, i)
        wait.replace_all_uses_with(_reshaped(make, part, list(wait.meta["val"].shape)))
    for collective in old:
        gm.graph.erase_node(*collective.users)
        gm.graph.erase_node(collective)
    _restore_order(gm.graph)
    gm.recompile()


def _reshaped(make: NodeMaker, node: Node, shape: list[int]) -> Node:
    if not node.meta["val"].is_contiguous():
        node = make(aten.clone.default, node, memory_format=torch.contiguous_format)
    return make(aten.view.default, node, shape)


def _in_common(collectives: Sequence[Node]) -> tuple[Any, ...]:
    """(dtype, then all arguments but the tensor), which must be the same for all."""
    keys = {(node.meta["val"].dtype, *node.args[1:]) for node in collectives}
    if len(keys) != 1:
        raise WorkbenchError(f"a bucket takes collectives of one group and dtype, not {sorted(map(str, keys))}")
    return keys.pop()


def _restore_order(graph: Graph) -> None:
    """Put each node behind what it reads; nodes that may stay keep their order."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    reads = nx.DiGraph()
    reads.add_nodes_from(nodes)
    reads.add_edges_from((needed, node) for node in nodes for needed in node.all_input_nodes)
    *others, output = nx.lexicographical_topological_sort(reads, place.__getitem__)
    for node in others:
        output.prepend(node)
