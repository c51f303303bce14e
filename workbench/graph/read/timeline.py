"""When each node of a graph would run: one stream for compute and one for each process group, from estimates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.cost import DeviceSpec, Known, collective_ms, device_spec, node_ms


@dataclass(frozen=True)
class Costs:
    """Estimated milliseconds by node, compute and collectives apart; the group and the start that waits wait for."""

    compute: dict[Node, float]
    collective: dict[Node, float]
    group: dict[Node, str]
    waits: dict[Node, Node]


def costs_of(gm: GraphModule, device: str | DeviceSpec, known: Known = lambda _: None,
             found: Sequence[Collective] | None = None) -> Costs:
    """What each node takes on a device, from shapes alone where it is not known: the same on ranks with one graph.

    `found`: the graph's collectives, where they were listed before.
    """
    spec = device_spec(device)
    named = {node.name: node for node in gm.graph.nodes}
    found = list_collectives(gm) if found is None else found
    return Costs(
        {node: node_ms(node, spec) if (ms := known(node)) is None else ms for node in gm.graph.nodes},
        {named[c.node]: collective_ms(c, spec) for c in found},
        {named[c.node]: c.group for c in found},
        {named[wait]: named[c.node] for c in found for wait in c.waits},
    )


@dataclass(frozen=True)
class Timeline:
    """Milliseconds from start to end, of compute alone, and, by collective, for which compute stood still."""

    total_ms: float
    compute_ms: float
    exposed: dict[Node, float]

    @property
    def exposed_ms(self) -> float:
        return sum(self.exposed.values())


class Clock:
    """Nodes issued one by one: compute in order, the collectives of one group one after another."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.now = 0.0
        self.begin: dict[Node, float] = {}
        self.finish: dict[Node, float] = {}
        self.exposed: dict[Node, float] = {}
        self._lanes: dict[str, float] = {}

    def ready_at(self, node: Node) -> float:
        """When what a wait, or a collective that blocks, waits for is there; 0 for every other node."""
        start = self.costs.waits.get(node)
        return self.finish.get(start, 0.0) if start is not None else 0.0

    def issue(self, node: Node) -> None:
        if launches := node in self.costs.collective:
            group = self.costs.group[node]
            begin = self.begin[node] = max(self.now, self._lanes.get(group, 0.0))
            self.finish[node] = self._lanes[group] = begin + self.costs.collective[node]
        if (ready := self.ready_at(node)) > self.now:
            start = self.costs.waits[node]
            self.exposed[start] = self.exposed.get(start, 0.0) + ready - self.now
            self.now = ready
        elif not launches:
            self.begin[node] = self.now
            self.now = self.finish[node] = self.now + self.costs.compute[node]


def simulate(nodes: Iterable[Node], costs: Costs) -> Timeline:
    """Issue the nodes in this order."""
    clock, compute = Clock(costs), 0.0
    for node in nodes:
        clock.issue(node)
        compute += costs.compute[node]
    return Timeline(clock.now, compute, clock.exposed)
