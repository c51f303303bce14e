"""What limits a step: the CPU, which launches operators one by one, or the device, which executes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.simulated_run import launches_of, simulated
from workbench.graph.read.timeline import costs_of
from workbench.recipe.wording import counted

Spans = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Pace:
    """Estimated microseconds of one step, on the CPU and on the device.

    launches: number of launches by the CPU. cpu_us: time of these launches. gpu_us: time of the device if everything
    were launched at once. step_us: time of both together. started, worked: intervals of the launches, and of the
    device's work. what: "step", or the part of one that this is; before_us: until when the device works on what comes
    before that part.
    """

    source: str
    launches: int
    cpu_us: float
    gpu_us: float
    step_us: float
    started: Spans = field(repr=False)
    worked: Spans = field(repr=False)
    what: str = "step"
    before_us: float = 0.0

    @property
    def bound(self) -> str:
        """"launches" where the CPU takes longer than the device, else "work"."""
        return "launches" if self.cpu_us > self.gpu_us else "work"

    @property
    def busy(self) -> float:
        """The share of the step in which the device works."""
        return self.gpu_us / self.step_us if self.step_us else 0.0

    def __str__(self) -> str:
        if self.before_us:
            work = sum(
                end - max(begin, self.before_us)
                for begin, end in self.worked
                if end > self.before_us
            )
            left = self.step_us - self.before_us
            return (
                f"{counted(self.launches, 'launch')}, CPU {self.cpu_us / 1e3:.2f} ms; behind the work before it "
                f"the {self.what} takes {left / 1e3:.2f} ms, the device waits {(left - work) / 1e3:.2f} ms of it"
            )
        return (
            f"{counted(self.launches, 'launch')}, CPU {self.cpu_us:,.0f} µs, device {self.gpu_us:,.0f} µs of work; "
            f"step {self.step_us:,.0f} µs, device busy {self.busy:.0%}: bound by {self.bound}"
        )


def paced(
    graphs: Mapping[str, GraphModule],
    device: str | DeviceSpec = "h100",
    *,
    launch_us: float | None = None,
    replayed: bool = False,
) -> Pace:
    """Simulate a step of these graphs, one after another, with the cost model and `launch_us` for each launch.

    An operator begins when the CPU has launched it and the device has finished the ones before. launch_us: by default
    what was measured of the machine. replayed: each graph is one launch. The estimate leaves out the device's own
    latency per kernel, and the copies before a replay. Raises WorkbenchError where no launch was measured on the
    device, and what `simulated` raises.
    """
    spec = device_spec(device)
    if launch_us is None:
        launch_us = spec.launch_us
    if launch_us is None:
        raise WorkbenchError(
            f"device {spec.name!r} has no measured launch: give launch_us, or a machine that "
            "`workbench calibrate` measured, such as h200x1"
        )
    run = simulated(graphs, spec, launch_us=launch_us, replayed=replayed)
    count = sum(len(launches_of(costs_of(gm, spec), replayed)) for gm in graphs.values())
    return Pace(
        f"simulated on {spec.name}, {spec.trust}, {launch_us:.3g} µs a launch",
        count,
        count * launch_us,
        simulated(graphs, spec).total_ms * 1e3,
        run.total_ms * 1e3,
        tuple((i * launch_us, (i + 1) * launch_us) for i in range(count)),
        tuple(sorted((1e3 * span.begin, 1e3 * span.end) for span in run.spans)),
    )
