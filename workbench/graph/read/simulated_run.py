"""A simulated step: what computes when, what each process group sends meanwhile, and which time is exposed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Collective, axis_names, list_launches
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.nodes import kind_of, module_path
from workbench.graph.read.timeline import Clock, Costs, costs_of
from workbench.recipe.files import write_whole

COMPUTE = "compute"
HIDDEN = "hidden"
BEHIND_OTHERS = "behind an exposed collective"
TAKEN = "the product that starts with it has taken the whole device"
CPU_LATE = "the CPU launched the next compute too late"  # of a measured step


class Span(NamedTuple):
    """One node on its lane, in milliseconds. exposed: how long compute is idle while it runs. shared: the part of
    that in which a collective that ends later runs too; 0 in a simulation.

    limit, of a collective: "hidden" if it runs beside compute; "behind an exposed collective" if it adds no time, but
    is concurrent with another one, for which compute waits; or the reason why it is exposed: bandwidth, latency, a
    queue on its process group, a product that started with it, or no compute between launch and wait. "" for compute.
    """

    name: str
    lane: str
    begin: float
    end: float
    exposed: float = 0.0
    limit: str = ""
    label: str = ""
    part: str = ""
    shared: float = 0.0

    @property
    def ms(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class StepTimeline:
    """Spans of one step on one rank. source: "simulated on h100, not calibrated", or "measured on NVIDIA H200"."""

    source: str
    spans: tuple[Span, ...] = field(repr=False)
    total_ms: float
    compute_ms: float

    @property
    def exposed_ms(self) -> float:
        return sum(span.exposed - span.shared for span in self.spans)

    @property
    def collectives(self) -> list[Span]:
        return [span for span in self.spans if span.lane != COMPUTE]

    @property
    def lanes(self) -> list[str]:
        """Compute first, then one lane for each process group."""
        return list(dict.fromkeys([COMPUTE, *(span.lane for span in self.spans)]))

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.total_ms:,.2f} ms, {self.compute_ms:,.2f} of it compute; {self.fates()}, "
            f"{self.exposed_ms:,.2f} ms exposed"
        )

    def fates(self) -> str:
        """How many collectives are hidden behind compute, and how many behind others."""
        hidden, others = (
            sum(span.limit == limit for span in self.collectives)
            for limit in (HIDDEN, BEHIND_OTHERS)
        )
        more = f" and {others} behind exposed ones" if others else ""
        return f"{hidden} of {len(self.collectives)} collectives hidden behind compute{more}"

    def to_perfetto(self, path: Path | str) -> Path:
        """Write a trace in the Chrome trace event format, which https://ui.perfetto.dev opens, and return the path.

        Source: "Trace Event Format", complete events; microseconds, one thread for each lane.
        """
        lanes = {lane: i for i, lane in enumerate(self.lanes)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": self.source}}
        ]
        events += [{"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": lane}}
                   for lane, i in lanes.items()]
        for span in self.spans:
            about: dict[str, Any] = {"part": span.part, "module": span.label}
            if span.limit:
                about |= {"exposed_ms": round(span.exposed - span.shared, 6), "limit": span.limit}
            events.append({"ph": "X", "pid": 0, "tid": lanes[span.lane], "name": span.name, "args": about,
                           "ts": round(span.begin * 1e3, 3), "dur": round(span.ms * 1e3, 3)})
        target = Path(path)
        write_whole(target, json.dumps({"traceEvents": events}))
        return target


def simulated(graphs: GraphModule | Mapping[str, GraphModule], device: str | DeviceSpec = "h100", *,
              fused: bool = False, launch_us: float = 0.0, view_us: float = 0.0,
              replayed: bool = False) -> StepTimeline:
    """Simulate the graphs one after another with the cost model: kernels in node order, one lane per process group.

    graphs: one, or several by name, such as forward and backward. fused: count the pointwise operators that a compiler
    would fuse as one kernel; otherwise each operator is a kernel. launch_us: the CPU's time for each launch, before
    which its kernel cannot begin. view_us: the CPU's time for each view. replayed: each graph is one launch. Raises
    WorkbenchError for an unknown device, a negative time, and for a graph without meta['val'], which has no shapes to
    estimate from.
    """
    if min(launch_us, view_us) < 0:
        raise WorkbenchError(
            f"launch_us={launch_us}, view_us={view_us}: the time of a launch must be 0 or more"
        )
    parts = {facts_of(graphs).part: graphs} if isinstance(graphs, GraphModule) else graphs
    spec = device_spec(device)
    spans: list[Span] = []
    start = compute = cpu = 0.0
    for part, gm in parts.items():
        if not any("val" in n.meta for n in gm.graph.nodes):
            raise WorkbenchError(
                f"no node of the {part} graph has meta['val'], so shapes and times are unknown: "
                "capture it, or run torch.fx.passes.fake_tensor_prop.FakeTensorProp first"
            )
        costs = costs_of(gm, spec, fused=fused)
        launched, cpu = _launched(costs, launch_us / 1e3, view_us / 1e3, cpu, replayed)
        drawn, total = _part(part, gm, costs, list_launches(gm), start,
                             launched if launch_us else {})
        compute += sum(span.ms for span in drawn if span.lane == COMPUTE)
        spans += drawn
        start += total
    how = ", kernels fused" if fused else ""
    if launch_us:
        how += f", {launch_us:.3g} µs a launch"
    return StepTimeline(
        f"simulated on {spec.name}, {spec.trust}{how}", tuple(spans), max(start, cpu), compute
    )


def _launched(
    costs: Costs, launch: float, view: float, cpu: float, replayed: bool
) -> tuple[dict[Node, float], float]:
    """When the CPU has launched each node, and when it has launched all, from `cpu` on; in milliseconds."""
    launches, launched_at = set(launches_of(costs, replayed)), dict[Node, float]()
    for node in costs.compute:
        if node in launches:
            cpu = launched_at[node] = cpu + launch
        elif not replayed and kind_of(node) == "view":
            cpu += view
    return launched_at, cpu


def launches_of(costs: Costs, replayed: bool = False) -> list[Node]:
    """The nodes that the CPU launches, in order: all that take time on the device, or the graph as a whole."""
    nodes = list(costs.compute)
    return (
        nodes[:1] if replayed else [n for n in nodes if costs.compute[n] or n in costs.collective]
    )


def _part(part: str, gm: GraphModule, costs: Costs, collectives: Sequence[Collective], start: float,
          launched: Mapping[Node, float]) -> tuple[list[Span], float]:
    """The spans of one graph, and its length. launched: when the CPU has launched each node, in ms of the step."""
    spec, clock, axes = costs.spec, Clock(costs), axis_names(gm)
    about = {c.node: c for c in collectives}
    issued: dict[str, tuple[float, float]] = {}
    spans: list[Span] = []
    idle: dict[str, float] = {}
    for node in gm.graph.nodes:
        if node in costs.collective:
            issued[node.name] = (clock.now, clock.compute_ms)
        elif (launch := costs.waits.get(node)) is not None:
            idle.setdefault(launch.name, clock.compute_ms - issued[launch.name][1])
        clock.now = max(clock.now, launched.get(node, start) - start)
        clock.issue(node)
        if costs.compute.get(node):
            begin = clock.finish[node] if node in costs.collective else clock.begin[node]
            spans.append(Span(node.name, COMPUTE, start + begin, start + clock.now, label=module_path(node), part=part))
    edges = [0.0, *(edge - start for span in spans for edge in (span.begin, span.end))]
    busy = [0.0, *accumulate(ms for span in spans for ms in (0.0, span.ms))]
    for node, ms in costs.collective.items():
        c = about[node.name]
        exposed = clock.exposed.get(node, 0.0)
        begin = clock.begin[node]
        finish = clock.finish[node]
        before, after = np.interp([begin, finish], edges, busy)
        limit = HIDDEN if after - before >= (finish - begin) / 2 else BEHIND_OTHERS
        if exposed > 0:
            if node in clock.delayed:
                limit = TAKEN
            elif node in costs.waits:
                limit = "the operator blocks until the collective ends"
            elif not idle.get(node.name):
                limit = "nothing computes between its start and its wait"
            elif begin - issued[node.name][0] > ms:
                limit = "waits for others on its process group"
            else:
                limit = "latency" if spec.latency_us / 1e3 > ms / 2 else "its bytes over the link"
        spans.append(Span(node.name, axes.get(c.group, c.axis or c.group), start + begin, start + finish,
                          exposed, limit, f"{c.kind} {c.payload:,} B {c.module}".strip(), part))
    return spans, clock.end
