"""A list schedule of the graph on two simulated queues, compute and collectives."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import exposed_in_node_order
from workbench.graph.read.cost import Known
from workbench.graph.read.measured_costs import Estimates, estimates_of
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.timeline import Clock, Costs, costs_of, simulate
from workbench.passes.effect import Effect
from workbench.passes.overlap_collectives import CONTRACT, OverlapOptions
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.torch_api.ops import aliased_inputs, draws, written_inputs


def less_exposed(before: Graphs, after: Graphs, options: OverlapOptions) -> Effect:
    """Compute waits for collectives for less time than before, as estimated over forward and backward."""
    known = Estimates(facts_of(after[0]).step.estimates)
    was, now = ([simulate(g.graph.nodes, _costs(g, options, known)).exposed_ms for g in graphs]
                for graphs in (before, after))
    bare = [sum(len(exposed_in_node_order(g)) for g in graphs) for graphs in (before, after)]
    evidence = {"exposed_ms": [round(sum(was), 4), round(sum(now), 4)], "with_nothing_between": bare}
    if not sum(was):
        return Effect(False, "no collective is exposed, as estimated", evidence)
    gained = sum(now) < 0.999 * sum(was)
    return Effect(gained, "" if gained else "no work is free to move behind what is exposed", evidence)


def _costs(gm: GraphModule, options: OverlapOptions, known: Known) -> Costs:
    return costs_of(gm, options.device, known, fused=options.fused)


def order_costs(options: OverlapOptions, gm: GraphModule) -> Costs:
    """The costs by which `overlap_collectives` has ordered the graph."""
    return _costs(gm, options, Estimates(facts_of(gm).step.estimates))


def constraints(gm: GraphModule) -> dict[Node, set[Node]]:
    """The nodes that must come before each node: its inputs, and those that no edge names.

    Readers and writers of a storage keep their order around each write, and random operators keep theirs. The
    collectives of one process group may change places: every rank finds the same order, and before the step runs the
    ranks compare theirs.
    """
    first: dict[Node, set[Node]] = {}
    roots: dict[Node, frozenset[Node]] = {}
    readers: dict[Node, set[Node]] = {}
    writer: dict[Node, Node] = {}
    drawn: Node | None = None
    for node in gm.graph.nodes:
        needed = set(node.all_input_nodes)
        roots[node] = frozenset().union(*(roots[n] for n in aliased_inputs(node))) or frozenset({node})
        written = {root for n in written_inputs(node) for root in roots[n]}
        for root in {root for n in node.all_input_nodes for root in roots[n]}:
            needed |= {writer[root]} if root in writer else set()
            if root in written:
                needed |= readers.pop(root, set())
                writer[root] = node
            else:
                readers.setdefault(root, set()).add(node)
        if draws(node):
            needed |= {drawn} if drawn is not None else set()
            drawn = node
        first[node] = needed - {node}
    return first


def schedule(gm: GraphModule, costs: Costs, horizon: float) -> list[Node]:
    """All nodes in a new order: the start of the longest chain comes first, and a wait when its result has arrived.

    A node moves by at most `horizon` times the longest collective, earlier or later. So memory and the collectives that
    bucketing has placed stay about where they are.
    """
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    first = constraints(gm)
    then: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node in nodes:
        for needed in first[node]:
            then[needed].append(node)
    below: dict[Node, float] = {}  # the longest chain from here to the end
    for node in reversed(nodes):
        below[node] = (costs.compute[node] + costs.collective.get(node, 0.0)
                       + max((below[user] for user in then[node]), default=0.0))
    place, total = [], 0.0
    for node in nodes:
        place.append(total)
        total += costs.compute[node]
    window = horizon * max(costs.collective.values(), default=0.0)

    clock = Clock(costs)
    out: list[Node] = []
    missing = {node: len(first[node]) for node in nodes}
    done: set[Node] = set()
    far = [i for i, node in enumerate(nodes) if not missing[node]]  # by their old place
    near: list[tuple[bool, float, int]] = []
    stalled: list[tuple[float, int]] = []
    oldest = 0
    while oldest < len(nodes):
        while far and place[far[0]] <= place[oldest] + window:
            node = nodes[heapq.heappop(far)]
            heapq.heappush(near, (node not in costs.collective, -below[node], index[node]))
        while stalled and stalled[0][0] <= clock.now:
            i = heapq.heappop(stalled)[1]
            heapq.heappush(near, (True, -below[nodes[i]], i))
        if near:
            node = nodes[heapq.heappop(near)[2]]
            if (ready := clock.ready_at(node)) > clock.now:
                heapq.heappush(stalled, (ready, index[node]))
                continue
        else:
            node = nodes[heapq.heappop(stalled)[1]]
        clock.issue(node)
        out.append(node)
        done.add(node)
        for user in then[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(far, index[user])
        while oldest < len(nodes) and nodes[oldest] in done:
            oldest += 1
    return out


def overlap_collectives(gm: GraphModule, example_inputs: list[Any], *, options: OverlapOptions) -> GraphModule:
    """Reorder the graph by estimates that are the same on every rank. No node is added, changed or removed.

    Of two orders, one hides behind all compute and one behind matmuls and attentions alone; the less exposed is taken.
    """
    known = estimates_of(gm, options)
    facts_of(gm).step.estimates.update(known.times)  # for the verdict
    costs = _costs(gm, options, known)
    products = replace(costs, compute={node: ms * is_compute(node) for node, ms in costs.compute.items()})
    order = min((schedule(gm, by, options.horizon) for by in (costs, products)),
                key=lambda nodes: simulate(nodes, costs).exposed_ms)
    if simulate(order, costs).exposed_ms < simulate(gm.graph.nodes, costs).exposed_ms:
        for node in order:
            if node.op not in ("placeholder", "output"):
                gm.graph.output_node().prepend(node)
    return gm


PASS = RegisteredPass(CONTRACT, overlap_collectives, less_exposed, order_costs=order_costs)
