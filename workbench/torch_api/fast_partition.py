"""torch's partitioner in less time, with the same result; `faster` is the one hook.

The minimum cut that torch asks networkx for is found locally: in a joint graph, nearly every edge may not be cut. The
nodes that such edges tie to the source or to the sink need no flow, and in the rest each path is a few edges long,
however deep the model is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import networkx
import torch
from torch._functorch import partitioners
from torch._logging._internal import log_state, trace_log
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from workbench.torch_api.aot import put

# 2.15 wraps networkx's function under the same name
CUT = partitioners if hasattr(partitioners, "minimum_cut") else networkx, "minimum_cut"
_COPY, _REORDER = Graph.node_copy, partitioners.reordering_to_mimic_autograd_engine


@contextlib.contextmanager
def faster(joint: Any = None) -> Iterator[None]:
    """Inside, torch's partitioner gives the same graphs in less time. joint: the export that torch compiles inside."""
    with (mock.patch.object(*CUT, minimum_cut), mock.patch.object(Graph, "node_copy", _node_copy),
          mock.patch.object(partitioners, "reordering_to_mimic_autograd_engine", _reordered),
          _without_texts(joint) if joint is not None else contextlib.nullcontext()):
        yield


def _node_copy(graph: Graph, node: torch.fx.Node, arg_transform: Callable[..., Any] = lambda n: n) -> torch.fx.Node:
    """`Graph.node_copy` without its search of the arguments for raw sizes, which the copied node has passed."""
    if graph.owning_module is not None:  # its hooks may expect the call
        return _COPY(graph, node, arg_transform)
    args, kwargs = (torch.fx.node.map_arg(given, arg_transform) for given in (node.args, node.kwargs))
    return put(graph, node, graph._graph_namespace.create_name(node.name, None), args, kwargs, copy.copy(node.meta))


def _reordered(graph: GraphModule) -> GraphModule:
    """The backward in autograd's order, as a lazy module, which writes its code when that is first needed."""
    with mock.patch.object(torch.fx, "GraphModule", _LazyGraphModule):
        return _REORDER(graph)


@contextlib.contextmanager
def _without_texts(joint: Any) -> Iterator[None]:
    """Graphs are not printed as text and code unless torch's logs ask for it, which saves a third of the time."""
    logged = bool(trace_log.handlers) or any(map(log_state.is_artifact_enabled, ("aot_joint_graph", "aot_graphs")))
    config = dataclasses.replace(joint._aot_state.aot_config, enable_log=logged)
    with mock.patch.object(joint._aot_state, "aot_config", config), _use_lazy_graph_module(True):
        yield


Node = Hashable
Room = defaultdict[Node, dict[Node, float]]
"""The residual capacity of each edge, and of its reverse."""

_BY_NETWORKX = networkx.minimum_cut


def minimum_cut(graph: Any, source: Node, sink: Node) -> tuple[float, tuple[set[Node], set[Node]]]:
    """Like `networkx.minimum_cut` of a directed graph with `capacity` on its edges: value, source side and sink side.

    The sink side holds the nodes that reach the sink in the residual graph, and is the same for every maximum flow.
    Raises NetworkXUnbounded where nothing can be cut.
    """
    first, last = _tied(graph.adj, source), _tied(graph.pred, sink)
    if not first.isdisjoint(last):
        return _BY_NETWORKX(graph, source, sink)  # raises NetworkXUnbounded
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
    behind = _search(sink, lambda node: (u for u in room[node] if room[u].get(node))).keys() | last
    return flow, (set(graph) - behind, behind)


def _tied(edges: Mapping[Node, Mapping[Node, Any]], start: Node) -> set[Node]:
    """The nodes that edges without a capacity limit lead to from `start`."""
    return set(_search(start, lambda node: (
        to for to, data in edges[node].items() if data.get("capacity", math.inf) == math.inf)))


def _push(room: Room, entry: Node, amount: float, sink: Node) -> float:
    """How much of `amount` flows from `entry` to `sink`, along shortest paths; `room` loses that capacity.

    A node without a path now has none later, since flow from elsewhere opens none: it is removed from `room`.
    """
    left = amount
    while left and entry in room:
        before = _search(entry, lambda node: (to for to, free in room[node].items() if free), sink)
        if sink not in before:
            for node in before:
                for other in room.pop(node):
                    if other in room:
                        del room[other][node]
            break
        path, at = list[tuple[Node, Node]](), sink
        while at != entry:
            path.append((before[at], at))
            at = before[at]
        step = min(left, *(room[u][v] for u, v in path))
        for u, v in path:
            room[u][v] -= step
            room[v][u] += step
        left -= step
    return amount - left


def _search(start: Node, after: Callable[[Node], Iterable[Node]], goal: Node = None) -> dict[Node, Node]:
    """The nodes that `after` leads to from `start`, nearest first and up to `goal`, with the node before each."""
    before, ahead = {start: start}, [start]
    for node in ahead:
        if goal in before:
            break
        for to in after(node):
            if to not in before:
                before[to] = node
                ahead.append(to)
    return before
