"""The minimum cut that torch's partitioner asks networkx for, found where the choice is: around each saved value.

In a joint graph nearly every edge may not be cut. What those tie to the source or to the sink is settled without a
flow, and in what is left every way is a few edges long, however deep the model is.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from typing import Any

import networkx

Node = Hashable
Room = defaultdict[Node, dict[Node, float]]
"""What can still flow along each edge, backwards too."""

_BY_NETWORKX = networkx.minimum_cut


def minimum_cut(graph: Any, source: Node, sink: Node) -> tuple[float, tuple[set[Node], set[Node]]]:
    """As `networkx.minimum_cut` of a directed graph with `capacity` on its edges: value, and source's and sink's side.

    The sink's side is what still reaches the sink under a maximum flow: the same nodes, whichever flow it is. Raises
    NetworkXUnbounded where nothing can be cut.
    """
    first, last = _tied(graph.adj, source), _tied(graph.pred, sink)
    if not first.isdisjoint(last):
        return _BY_NETWORKX(graph, source, sink)  # which says so
    room: Room = defaultdict(dict)
    for u, v, capacity in graph.edges(data="capacity", default=math.inf):
        if u not in last and v not in first:
            u, v = source if u in first else u, sink if v in last else v
            room[u][v] = room[u].get(v, 0) + capacity
            room[v].setdefault(u, 0)
    flow = room[source].pop(sink, 0)
    entries = room.pop(source, {})
    for entry in entries:
        del room[entry][source]
    for entry, capacity in entries.items():
        flow += _push(room, entry, capacity, sink)
    behind = _reaching(room, sink) | last
    return flow, (set(graph) - behind, behind)


def _tied(edges: Mapping[Node, Mapping[Node, Any]], start: Node) -> set[Node]:
    """What edges without limit lead to from `start`."""
    found, ahead = {start}, [start]
    while ahead:
        for node, data in edges[ahead.pop()].items():
            if node not in found and data.get("capacity", math.inf) == math.inf:
                found.add(node)
                ahead.append(node)
    return found


def _push(room: Room, entry: Node, amount: float, sink: Node) -> float:
    """How much of `amount` flows from `entry` to `sink`, by shortest ways; takes it out of `room`.

    What has no way now has none later, since flow from elsewhere opens none: it leaves `room`.
    """
    left = amount
    while left and entry in room:
        before = _search(room, entry, sink)
        if sink not in before:
            for node in before:
                for other in room.pop(node):
                    if other in room:
                        del room[other][node]
            break
        way, at = list[tuple[Node, Node]](), sink
        while at != entry:
            way.append((before[at], at))
            at = before[at]
        step = min(left, *(room[u][v] for u, v in way))
        for u, v in way:
            room[u][v] -= step
            room[v][u] += step
        left -= step
    return amount - left


def _search(room: Room, entry: Node, sink: Node) -> dict[Node, Node]:
    """What flow from `entry` can get to, nearest first and until the sink is found, with the node before each."""
    before: dict[Node, Node] = {entry: entry}
    ahead = deque([entry])
    while ahead and sink not in before:
        node = ahead.popleft()
        for to, left in room[node].items():
            if left and to not in before:
                before[to] = node
                ahead.append(to)
    return before


def _reaching(room: Room, sink: Node) -> set[Node]:
    found, ahead = {sink}, [sink]
    while ahead:
        node = ahead.pop()
        for u in room[node]:
            if u not in found and room[u].get(node):
                found.add(u)
                ahead.append(u)
    return found
