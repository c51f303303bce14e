"""Estimated start and end of each node: one stream for compute, one for each process group and way to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Groups, collective_of, list_launches
from workbench.graph.read.cost import DEVICES, DeviceSpec, collective_ms, device_spec, node_ms
from workbench.graph.read.fused_cost import fused_ms, separate_ms
from workbench.graph.read.nodes import is_compute
from workbench.torch_api.ops import collective_kind


@dataclass(frozen=True)
class Costs:
    """Estimated milliseconds by node, of compute and of collectives.

    group: process group of each collective. waits: the collective that each wait waits for. spec: the device.
    """

    compute: dict[Node, float]
    collective: dict[Node, float]
    group: dict[Node, str]
    waits: dict[Node, Node]
    spec: DeviceSpec = DEVICES["h100"]


def scheduler_ms(
    gm: GraphModule, device: str | DeviceSpec
) -> Callable[[Node, int | None], float]:
    """The time of one node of the graph, also of one that a scheduler adds; of a collective with `size` bytes, too."""
    spec, groups = device_spec(device), Groups(facts_of(gm))

    def ms(node: Node, size: int | None = None) -> float:
        if collective_kind(node.target) is not None:
            return collective_ms(collective_of(node, groups), spec, size)
        return node_ms(node, spec)

    return ms


def costs_of(gm: GraphModule, device: str | DeviceSpec, *, fused: bool = False) -> Costs:
    """The time of each node on a device, by its shapes. Equal graphs cost the same.

    fused: as where a compiler follows, which fuses pointwise operators; otherwise each operator is a kernel.
    """
    spec = device_spec(device)
    costs = Costs(fused_ms(gm, spec) if fused else separate_ms(gm, spec), {}, {}, {}, spec)
    named = {node.name: node for node in gm.graph.nodes}
    for c in list_launches(gm):
        node = named[c.node]
        costs.collective[node] = not_hidden(collective_ms(c, spec), costs.compute[node], c.group_size)
        costs.group[node] = c.group
        costs.waits.update((named[wait], node) for wait in c.waits)
    return costs


def not_hidden(sending: float, multiplying: float, parts: int) -> float:
    """How much longer an operator takes that sends in `parts` while it multiplies, than its products alone.

    One part is sent before the first product, or after the last one. Without products, all of it counts.
    """
    if not multiplying:
        return sending
    return max(sending - multiplying, 0.0) + min(sending, multiplying) / parts


class Clock:
    """Nodes issued one by one: compute in order, the collectives of one group one after another. In milliseconds.

    now: the end of the compute so far. compute_ms: compute alone. begin, finish: by node. exposed: by collective, how
    long compute stood still for it. delayed: the collectives that waited for the product that started with them.
    """

    def __init__(self, costs: Costs):
        self.costs, self.now, self.compute_ms = costs, 0.0, 0.0
        self.begin: dict[Node, float] = {}
        self.finish: dict[Node, float] = {}
        self.exposed: dict[Node, float] = {}
        self.delayed: set[Node] = set()
        self._lanes: dict[str, float] = {}
        self._flying: list[Node] = []

    def ready_at(self, node: Node) -> float:
        """When the result of a wait, or of a blocking collective, arrives; 0 for every other node."""
        start = self.costs.waits.get(node)
        return self.finish.get(start, 0.0) if start is not None else 0.0

    def issue(self, node: Node) -> None:
        if launches := node in self.costs.collective:
            group = self.costs.group[node]
            begin = self.begin[node] = max(self.now, self._lanes.get(group, 0.0))
            self.finish[node] = self._lanes[group] = begin + self.costs.collective[node]
            self._flying.append(node)
        if (ready := self.ready_at(node)) > self.now:
            start = self.costs.waits[node]
            self.exposed[start] = self.exposed.get(start, 0.0) + ready - self.now
            self.now = ready
        if not launches or self.costs.compute.get(node):  # what sends may multiply, too
            self.begin.setdefault(node, self.now)
            took = self._contended(self.costs.compute[node], is_compute(node) and not launches)
            self.now += took
            self.finish.setdefault(node, self.now)
            self.compute_ms += took

    def _contended(self, ms: float, product: bool) -> float:
        """How long compute of `ms` takes while collectives run, which it slows down in turn.

        A product that starts before a collective sends has taken all of the device: the collective waits for its end.
        """
        spec = self.costs.spec
        self._flying = [n for n in self._flying if self.finish[n] > self.now]
        late = set()
        for node in self._flying if product and spec.product_delays else ():
            if node not in self.delayed and self.now <= self.begin[node] < self.now + ms:
                late.add(node)
                self._delay(node, spec.product_delays * (self.now + ms - self.begin[node]))
        self.delayed |= late
        sending = [n for n in self._flying if n not in late]
        if not sending or spec.compute_slowdown == spec.collective_slowdown == 1.0:
            return ms
        together = min(ms * spec.compute_slowdown, max(self.finish[n] for n in sending) - self.now)
        for node in sending:
            beside = min(together, self.finish[node] - self.now)
            self.finish[node] += beside * (1 - 1 / spec.collective_slowdown)
            group = self.costs.group[node]
            self._lanes[group] = max(self._lanes[group], self.finish[node])
        return together + ms - together / spec.compute_slowdown

    def _delay(self, first: Node, ms: float) -> None:
        """A collective begins later by `ms`, and so do those that are queued behind it."""
        group, begin = self.costs.group[first], self.begin[first]
        for node in self._flying:
            if self.costs.group[node] == group and self.begin[node] >= begin:
                self.begin[node] += ms
                self.finish[node] += ms
        self._lanes[group] += ms

    @property
    def exposed_ms(self) -> float:
        return sum(self.exposed.values())

    @property
    def end(self) -> float:
        """When compute and all collectives have ended, also those that nothing waits for."""
        return max([self.now, *(self.finish[n] for n in self.costs.collective)])


def simulate(nodes: Iterable[Node], costs: Costs) -> Clock:
    """The clock after these nodes, in this order."""
    clock = Clock(costs)
    for node in nodes:
        clock.issue(node)
    return clock
