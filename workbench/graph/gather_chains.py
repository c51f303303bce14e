"""Gather chains: how a sharded parameter becomes the whole weight that an operator reads."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from workbench.graph.read.memory import Flow, parameter_gathers
from workbench.graph.read.nodes import is_backward


def gather_chains(graph: GraphModule) -> Iterator[tuple[Node, list[Node]]]:
    """Each parameter placeholder that is all-gathered, with the forward nodes whose value comes from it alone.

    The chain holds casts, the gather, its wait, and every view, slice, cat or cast after it (`t > t > view` too),
    up to the first operator that computes or reads anything else.
    """
    flow = Flow(graph)
    gathered = {
        flow.parameters(gather)
        for gather in parameter_gathers(graph, flow)
        if not is_backward(gather)
    }
    for placeholder in graph.graph.find_nodes(op="placeholder"):
        alone = frozenset([placeholder])
        chain: dict[Node, None] = {}
        frontier = [placeholder] if alone in gathered else []
        while frontier:
            for user in frontier.pop().users:
                if user not in chain and not is_backward(user) and flow.parameters(user) == alone:
                    chain[user] = None
                    frontier.append(user)
        if chain:
            yield placeholder, list(chain)
