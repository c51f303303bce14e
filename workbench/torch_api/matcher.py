"""torch's subgraph matcher, and a laxer one that finds near misses.

Source: torch/fx/passes/utils/matcher_utils.py.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher


class _Leaking(SubgraphMatcher):
    """Also finds places whose inner values are read from outside."""

    def _is_contained(self, nodes_map: dict[Node, Node]) -> bool:
        return True


def matches(pattern: Graph, graph: Graph, *, contained: bool = True) -> list[InternalMatch]:
    """Places in `graph` that match `pattern`, without overlap. The pattern's inputs stand for any different values.

    contained: values that the pattern does not return are only read inside the place. Every operator of the pattern
    must be in the graph.
    """
    kind: Any = SubgraphMatcher if contained else _Leaking
    return kind(pattern).match(graph)


def leaks(pattern: Graph, place: InternalMatch) -> list[tuple[Node, Node]]:
    """(inner node, reader outside the place) for the values that the pattern would have to return."""
    inside = {gn for pn, gn in place.nodes_map.items() if pn.op != "placeholder"}
    returned = set(pattern.output_node().all_input_nodes)
    return [
        (gn, user)
        for pn, gn in place.nodes_map.items()
        if pn.op != "placeholder" and pn not in returned
        for user in gn.users
        if user not in inside
    ]
