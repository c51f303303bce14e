"""Gather chains: how a sharded parameter becomes the whole weight that an operator reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.nodes import kind_of
from workbench.torch_api import aot

_MOVES = frozenset({"view", "copy", "wait", "collective", "bookkeeping"})
_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def is_backward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def gather_chains(graph: GraphModule) -> Iterator[tuple[Node, list[Node]]]:
    """Each parameter placeholder whose value is all-gathered, with the forward nodes derived from it alone.

    The chain holds casts, the gather, its wait, and every view, slice, cat or cast after it (`t > t > view` too),
    up to the first operator that computes or reads anything else.
    """
    for placeholder in graph.graph.find_nodes(op="placeholder"):
        if not aot.is_parameter(placeholder):
            continue
        chain: dict[Node, None] = {}
        frontier = [placeholder]
        while frontier:
            for user in frontier.pop().users:
                alone = all(i is placeholder or i in chain for i in user.all_input_nodes)
                moves = user.op == "call_function" and kind_of(user) in _MOVES
                if moves and user not in chain and alone and not is_backward(user):
                    chain[user] = None
                    frontier.append(user)
        if any(n.target is _GATHER for n in chain):
            yield placeholder, list(chain)
