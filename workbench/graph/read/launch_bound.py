"""Who sets the pace of a step: the CPU that starts operators one by one, or the device that works them off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.replay import starts_work
from workbench.graph.read.simulated_run import simulated
from workbench.graph.read.timeline import Clock, Costs, costs_of
from workbench.recipe.wording import counted

Spans = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Pace:
    """One step on two clocks, in microseconds; estimates.

    launches: how often the CPU starts something. cpu_us: what that takes. gpu_us: what the device would take if
    everything were started at once. step_us: both together. started and worked: when the CPU starts something and when
    the device works.
    """

    source: str
    launches: int
    cpu_us: float
    gpu_us: float
    step_us: float
    started: Spans = field(repr=False)
    worked: Spans = field(repr=False)

    @property
    def bound(self) -> str:
        """"launches" where the CPU needs longer than the device, else "work"."""
        return "launches" if self.cpu_us > self.gpu_us else "work"

    def __str__(self) -> str:
        return (f"{counted(self.launches, 'launch')}, CPU {self.cpu_us:,.0f} µs, device "
                f"{self.gpu_us:,.0f} µs of work; step {self.step_us:,.0f} µs: bound by {self.bound}")


def paced(
    graphs: Mapping[str, GraphModule], device: str | DeviceSpec = "h100", *, launch_us: float, replayed: bool = False
) -> Pace:
    """The step of these graphs, one after another, on the cost model's clock.

    An operator begins when the CPU has started it, `launch_us` after the one before, and the device has come to it.
    replayed: each graph is one launch. What a device takes to begin a kernel is not in the estimate, nor the copies
    before a replay. Raises WorkbenchError for a negative `launch_us`, and what `simulated` raises.
    """
    if launch_us < 0:
        raise WorkbenchError(f"paced(launch_us={launch_us}): a launch takes no less than no time: 0 or more")
    spec = device_spec(device)
    alone = simulated(graphs, spec).total_ms * 1e3
    cpu = now = 0.0
    started: list[tuple[float, float]] = []
    worked: list[tuple[float, float]] = []
    for gm in graphs.values():
        costs = costs_of(gm, spec)
        clock = Clock(costs)
        clock.now = now
        for i, node in enumerate(gm.graph.nodes):
            if (i == 0) if replayed else starts_work(node):
                started.append((cpu, cpu + launch_us))
                cpu += launch_us
                clock.now = max(clock.now, cpu / 1e3)
            clock.issue(node)
        worked += ((1e3 * clock.begin[n], 1e3 * clock.finish[n]) for n in _working(costs))
        now = max([clock.now, *(clock.finish[n] for n in costs.collective)])
    return Pace(f"simulated on {spec.name}, {launch_us:g} µs a launch", len(started), cpu, alone,
                max(cpu, 1e3 * now), tuple(started), tuple(sorted(worked)))


def _working(costs: Costs) -> Iterator[Node]:
    yield from (node for node, ms in costs.compute.items() if ms and node not in costs.collective)
    yield from costs.collective
