"""What limits a step: the CPU, which launches operators one by one, or the device, which executes them."""

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
    """Estimated microseconds of one step, on the CPU and on the device.

    launches: number of launches by the CPU. cpu_us: time of these launches. gpu_us: time of the device if everything
    were launched at once. step_us: time of both together. started, worked: intervals of the launches, and of the
    device's work.
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
        """"launches" where the CPU takes longer than the device, else "work"."""
        return "launches" if self.cpu_us > self.gpu_us else "work"

    def __str__(self) -> str:
        return (f"{counted(self.launches, 'launch')}, CPU {self.cpu_us:,.0f} µs, device "
                f"{self.gpu_us:,.0f} µs of work; step {self.step_us:,.0f} µs: bound by {self.bound}")


def paced(
    graphs: Mapping[str, GraphModule], device: str | DeviceSpec = "h100", *, launch_us: float, replayed: bool = False
) -> Pace:
    """Simulate a step of these graphs, one after another, with the cost model and `launch_us` for each launch.

    An operator begins when the CPU has launched it and the device has finished the ones before. replayed: each graph is
    one launch. The estimate leaves out the device's own latency per kernel, and the copies before a replay. Raises
    WorkbenchError for a negative `launch_us`, and what `simulated` raises.
    """
    if launch_us < 0:
        raise WorkbenchError(f"paced(launch_us={launch_us}): the time of a launch must be 0 or more")
    spec = device_spec(device)
    alone = simulated(graphs, spec).total_ms * 1e3
    cpu = now = 0.0
    started: list[tuple[float, float]] = []
    worked: list[tuple[float, float]] = []
    for gm in graphs.values():
        costs = costs_of(gm, spec)
        clock = Clock(costs, now)
        for i, node in enumerate(gm.graph.nodes):
            if (i == 0) if replayed else starts_work(node):
                started.append((cpu, cpu + launch_us))
                cpu += launch_us
                clock.now = max(clock.now, cpu / 1e3)
            clock.issue(node)
        worked += ((1e3 * clock.begin[n], 1e3 * clock.finish[n]) for n in _working(costs))
        now = clock.end
    return Pace(f"simulated on {spec.name}, {launch_us:g} µs a launch", len(started), cpu, alone,
                max(cpu, 1e3 * now), tuple(started), tuple(sorted(worked)))


def _working(costs: Costs) -> Iterator[Node]:
    yield from (node for node, ms in costs.compute.items() if ms and node not in costs.collective)
    yield from costs.collective
