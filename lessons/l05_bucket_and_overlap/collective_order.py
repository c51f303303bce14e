"""Drag a collective's start to the left: exposed time and peak memory follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import traitlets
from ipywidgets import Checkbox, Dropdown
from torch.fx import GraphModule, Node

from workbench.checks.lint import lint
from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.list_schedule import constraints
from workbench.graph.read.collectives import axis_names, list_collectives
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.memory import item_roots, roots
from workbench.graph.read.nodes import is_compute, module_path
from workbench.graph.read.peak import freed_by_graph, live_bytes
from workbench.graph.read.simulated_run import simulated
from workbench.graph.read.timeline import Costs, costs_of
from workbench.notebook.draw.picture import Picture
from workbench.notebook.draw.timeline import lane_colors, timeline
from workbench.passes.overlap_collectives import OverlapOptions, overlap_collectives
from workbench.pipeline.run_passes import copy_graph
from workbench.torch_api.ops import collective_kind, own_bytes
from workbench_lessons.course.grading import Graded, targets
from workbench_lessons.course.moment import Moment


class CollectiveOrder(Moment):
    """A small graph on a clock, whose collectives can be moved; what a node reads is a wall.

    `order`: the names of all nodes, as they stand now.
    `given`: the order as captured. `reads`: by name, the nodes that a node reads. `selected`: a collective or a wait.
    `figures`: exposed and total milliseconds, and the peak in bytes. `race`: show the order of overlap_collectives
    below.
    """

    order = traitlets.List(traitlets.Unicode()).tag(sync=True)
    selected = traitlets.Unicode().tag(sync=True)
    race = traitlets.Bool().tag(sync=True)

    def __init__(self, graph: GraphModule, device: str | DeviceSpec = "h100", title: str = ""):
        self._graph, self._spec, self.part = copy_graph(graph), device_spec(device), facts_of(graph).part
        self.given = [n.name for n in graph.graph.nodes]
        self.reads = {n.name: [m.name for m in n.all_input_nodes] for n in graph.graph.nodes}
        rival = copy_graph(graph)
        overlap_collectives(rival, [], options=OverlapOptions(device=self._spec.name, fused=False))
        self.rival = [n.name for n in rival.graph.nodes]
        super().__init__("order", title or f"order of the {self.part}",
                         tables(graph, self._spec) | {"rival": [self.given.index(name) for name in self.rival]},
                         order=self.given)
        self.figures = self.measure(self.given)
        moves = [name for c in list_collectives(graph) for name in dict.fromkeys((c.node, *c.waits))]
        self.add(self.link("selected", Dropdown(options=[("none", ""), *((n, n) for n in moves)],
                                                description="selected")),
                 self.link("race", Checkbox(description="race overlap_collectives", indent=False)),
                 self.setting("as captured", order=self.given))

    def move(self, name: str, before: str) -> None:
        """Put a node before another one, as a drag does: casts and views come along where they must.

        Raises WorkbenchError for a name that the graph does not have, and at a wall: a product, a launch or a wait
        that would have to come along.
        """
        order, nodes = list(self.order), {n.name: n for n in self._graph.graph.nodes}
        if unknown := [each for each in (name, before) if each not in nodes]:
            raise WorkbenchError(f"{unknown[0]!r} is no node of this graph: board.order lists them")
        needs, heavy = constraints(self._graph), heavy_nodes(self._graph, costs_of(self._graph, self._spec))
        here, there = order.index(name), order.index(before)
        left = there < here
        along = [name]
        for each in reversed(order[there:here]) if left else order[here + 1:there]:
            pairs = [(other, each) if left else (each, other) for other in along]
            tied = next((f"{b} reads {a}" for b, a in pairs if nodes[a] in needs[nodes[b]]), "")
            if tied and (each == before or nodes[each] in heavy):
                raise WorkbenchError(f"wall: {tied}")
            along += [each] if tied else []
        stay = [each for each in order if each not in along]
        at = stay.index(before) if before != name else here
        self.order = [*stay[:at], *(each for each in order if each in along), *stay[at:]]

    def measure(self, order: Sequence[str]) -> dict[str, float]:
        """The figures of an order of this graph, as the simulator has them."""
        changed = copy_graph(self._graph)
        reorder(changed, order)
        run, memory = simulated(changed, self._spec), live_bytes(changed)
        return {"exposed ms": round(run.exposed_ms, 4), "step ms": round(run.total_ms, 4),
                "peak bytes": memory.peak_bytes}

    def picture(self) -> Picture:
        """What a reader sees where no script runs: the order as captured, on the clock."""
        return timeline({"as captured": simulated(self._graph, self._spec)})

    @traitlets.observe("order")
    def _moved(self, change: Any) -> None:
        self.message = self.problem(change.new)
        self.figures = {} if self.message else self.measure(change.new)

    def problem(self, order: Sequence[str]) -> str:
        """Why no stage could take this order, in the words of the check that says so."""
        if problem := difference(order, self._graph):
            return problem
        changed = copy_graph(self._graph)
        reorder(changed, order)
        found = lint([self._graph], [changed])
        return f"lint: {found.outcome} ({found.message})" if found.message else ""


def difference(order: Sequence[str], gm: GraphModule) -> str:
    """How the order differs from a permutation of the graph's nodes, in words; "" for a permutation."""
    names = [n.name for n in gm.graph.nodes]
    known, listed = set(names), Counter(order)
    faults = {
        "names are not in the graph": [name for name in order if name not in known],
        "nodes are missing": [name for name in names if name not in listed],
        "names stand twice": [name for name, times in listed.items() if times > 1],
    }
    if not any(faults.values()):
        return ""
    another = len(faults["names are not in the graph"]) > len(names) / 2
    whole = "is of another graph" if another else "is no permutation of the graph's nodes"
    details = "; ".join(f"{len(faulty)} {what}, {faulty[0]} first" for what, faulty in faults.items() if faulty)
    return f"the order {whole} ({facts_of(gm).part}, {len(names)} nodes): {details}"


def reorder(gm: GraphModule, order: Sequence[str]) -> None:
    """Put the nodes of a graph in this order, in place; raises WorkbenchError where it is no permutation of them."""
    if problem := difference(order, gm):
        raise WorkbenchError(problem)
    nodes = {n.name: n for n in gm.graph.nodes}
    first = next(iter(gm.graph.nodes))
    if first.name != order[0]:
        first.prepend(nodes[order[0]])
    for before, after in pairwise(order):
        nodes[before].append(nodes[after])


def heavy_nodes(gm: GraphModule, costs: Costs) -> set[Node]:
    """What never comes along when another node moves: products, launches and waits."""
    return {n for n in gm.graph.nodes if is_compute(n) or n in costs.collective or n in costs.waits}


def tables(gm: GraphModule, spec: DeviceSpec) -> dict[str, Any]:
    """All that the simulator in the page reads, by the node's place in the graph."""
    nodes = list(gm.graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    costs, axes = costs_of(gm, spec), axis_names(gm)
    groups = sorted(set(costs.group.values()))
    lanes = [axes.get(group, group) for group in groups]
    tensor = roots(gm)
    owner = item_roots(gm, tensor)
    size = {n: own_bytes(n) for n in nodes if owner[n] is n}
    for node in list(size):
        if tensor[node] is not node:
            size[tensor[node]] -= size[node]
    inputs = {n for n in size if n.op in ("placeholder", "get_attr")}
    kept = {n for n in inputs if not freed_by_graph(n, facts_of(gm).part == "backward")}
    starts = {wait: start for wait, start in costs.waits.items() if wait is not start}
    heavy = heavy_nodes(gm, costs)
    needs = constraints(gm)
    return {
        "names": [n.name for n in nodes], "modules": [module_path(n) for n in nodes],
        "ms": [costs.collective.get(n, costs.compute[n]) for n in nodes],
        "kind": [collective_kind(n.target) or "" for n in nodes],
        "group": [groups.index(costs.group[n]) if n in costs.group else -1 for n in nodes],
        "lanes": lanes, "colors": list(lane_colors(["compute", *lanes]).values()),
        "waits": [at[costs.waits[n]] if n in costs.waits else -1 for n in nodes],
        "movable": [int(n in costs.collective or n in starts) for n in nodes],
        "heavy": [int(n in heavy) for n in nodes], "needs": [sorted(at[m] for m in needs[n]) for n in nodes],
        "fixed": [int(n.op in ("placeholder", "output")) for n in nodes],
        "owner": [at[owner[n]] for n in nodes], "root": [at[tensor[n]] for n in nodes],
        "uses": [[at[owner[m]] for m in n.all_input_nodes] for n in nodes],
        "size": [size.get(n, 0) for n in nodes], "input": [int(n in inputs) for n in nodes],
        "kept": [int(n in kept) for n in nodes],
        "slow": [spec.compute_slowdown, spec.collective_slowdown, spec.product_delays],
    }


def ordered(answer: Any, *, board: CollectiveOrder, at_most: Mapping[str, float]) -> Graded:
    """An order of a board's graph. One that is no permutation, of another graph or illegal scores 0, and says why."""
    order = answer.order if isinstance(answer, CollectiveOrder) else answer
    if not isinstance(order, list | tuple) or not all(isinstance(name, str) for name in order):
        return 0.0, "give the board, or the names of all its nodes in their order"
    if problem := board.problem(order):
        return 0.0, problem
    return targets(board.measure(order), at_most=at_most, start=board.measure(board.given))
