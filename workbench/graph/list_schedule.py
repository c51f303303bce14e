"""A list schedule of a graph on two simulated queues, compute and collectives."""

from __future__ import annotations

import heapq
from itertools import accumulate

import networkx as nx
from torch.fx import GraphModule, Node

from workbench.graph.read.fused_cost import fusion_groups, with_views
from workbench.graph.read.timeline import Clock, Costs
from workbench.torch_api.ops import aliased_inputs, is_random, written_inputs


def constraints(gm: GraphModule) -> dict[Node, set[Node]]:
    """The nodes that must come before each node: its inputs, and those that no edge names.

    Readers and writers of a storage keep their order around each write, and random operators keep theirs. The
    collectives of one process group may change places: every rank finds the same order, and before the step runs the
    ranks compare theirs.
    """
    needs: dict[Node, set[Node]] = {}
    roots: dict[Node, frozenset[Node]] = {}
    readers: dict[Node, set[Node]] = {}
    writer: dict[Node, Node] = {}
    last_random: Node | None = None
    for node in gm.graph.nodes:
        needed = set(node.all_input_nodes)
        roots[node] = frozenset().union(*(roots[n] for n in aliased_inputs(node))) or frozenset(
            {node}
        )
        written = {root for n in written_inputs(node) for root in roots[n]}
        for root in {root for n in node.all_input_nodes for root in roots[n]}:
            needed |= {writer[root]} if root in writer else set()
            if root in written:
                needed |= readers.pop(root, set())
                writer[root] = node
            else:
                readers.setdefault(root, set()).add(node)
        if is_random(node):
            needed |= {last_random} if last_random is not None else set()
            last_random = node
        needs[node] = needed - {node}
    return needs


def units_of(
    gm: GraphModule, needs: dict[Node, set[Node]], *, fused: bool
) -> tuple[list[list[Node]], list[set[int]]]:
    """What moves as one, in an order of the graph, and the units that must come before each.

    fused: the nodes of a kernel that a compiler would fuse, with their views; otherwise each node. A compiler calls a
    kernel where the last of its nodes stands, and would delay a collective that waits for one of the others.
    """
    nodes = list(gm.graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    unit_of = dict(index)
    for group in fusion_groups(gm) if fused else []:
        for node in with_views(group):
            unit_of[node] = index[group[-1]]
    before = nx.DiGraph()
    before.add_nodes_from(unit_of.values())
    for node in nodes:
        for needed in needs[node]:
            if unit_of[needed] != unit_of[node]:
                before.add_edge(unit_of[needed], unit_of[node])
    # writes tie kernels together that could otherwise be fused
    if not nx.is_directed_acyclic_graph(before):
        return units_of(gm, needs, fused=False)
    order = list(nx.lexicographical_topological_sort(before))
    place = {unit: i for i, unit in enumerate(order)}
    units: list[list[Node]] = [[] for _ in order]
    for node in nodes:
        units[place[unit_of[node]]].append(node)
    return units, [{place[needed] for needed in before.predecessors(unit)} for unit in order]


def schedule(gm: GraphModule, costs: Costs, horizon: float, *, fused: bool = False) -> list[Node]:
    """All nodes in a new order: the start of the longest chain comes first, and a wait when its result has arrived.

    A unit moves by at most `horizon` times the longest collective, earlier or later. So memory and the collectives that
    bucketing has placed stay about where they are. fused: see `units_of`.
    """
    units, needs = units_of(gm, constraints(gm), fused=fused)
    readers: list[list[int]] = [[] for _ in units]
    for unit, needed in enumerate(needs):
        for i in needed:
            readers[i].append(unit)
    ms = [sum(costs.compute[node] for node in nodes) for nodes in units]
    chain_ms = [0.0] * len(units)  # the longest chain from here to the end
    for i in reversed(range(len(units))):
        longest = max((chain_ms[reader] for reader in readers[i]), default=0.0)
        chain_ms[i] = ms[i] + costs.collective.get(units[i][0], 0.0) + longest
    place = [0.0, *accumulate(ms)]
    window = horizon * max(costs.collective.values(), default=0.0)

    clock = Clock(costs)
    order: list[Node] = []
    missing = [len(needed) for needed in needs]
    done: set[int] = set()
    far = [i for i in range(len(units)) if not missing[i]]  # by their old place
    near: list[tuple[bool, float, int]] = []
    stalled: list[tuple[float, int]] = []
    oldest = 0
    while oldest < len(units):
        while far and place[far[0]] <= place[oldest] + window:
            i = heapq.heappop(far)
            heapq.heappush(near, (units[i][0] not in costs.collective, -chain_ms[i], i))
        while stalled and stalled[0][0] <= clock.now:
            i = heapq.heappop(stalled)[1]
            heapq.heappush(near, (True, -chain_ms[i], i))
        if near:
            i = heapq.heappop(near)[2]
            ready = clock.ready_at(units[i][0])
            if ready > clock.now:
                heapq.heappush(stalled, (ready, i))
                continue
        else:
            i = heapq.heappop(stalled)[1]
        for node in units[i]:
            clock.issue(node)
        order += units[i]
        done.add(i)
        for reader in readers[i]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(far, reader)
        while oldest < len(units) and oldest in done:
            oldest += 1
    return order
