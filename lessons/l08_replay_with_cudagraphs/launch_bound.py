"""What limits a step: the CPU, which launches operators one by one, or the device, which executes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.simulated_run import launches_of, simulated
from workbench.graph.read.timeline import costs_of
from workbench.notebook.draw.colors import BLUE, GREY, INK, ORANGE, PAPER
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.notebook.draw.timeline import bars
from workbench.recipe.wording import counted

COUNTABLE = 60  # launches that are drawn one by one, with white edges; more of them are one bar
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
                f"{counted(self.launches, 'launch')} in {self.cpu_us / 1e3:.2f} ms; the {self.what} takes "
                f"{left / 1e3:.2f} ms, of which the device waits {(left - work) / 1e3:.2f} ms"
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


def draw_pace(paces: Mapping[str, Pace], *, one_scale: bool = True) -> Picture:
    """A panel for each step, under its title: launches above, the device's work below; work before a part is grey.

    Raises WorkbenchError without any step.
    """
    if not paces:
        raise WorkbenchError(
            'draw_pace: give one step or more, by title: {"node by node": paced(...)}'
        )
    figure, shown = panels(
        9.6, 0.95 + (1.15 if one_scale else 1.35) * len(paces), len(paces), sharex=one_scale
    )
    end = 1.03 * max(found.step_us for found in paces.values())
    lines = []
    for axes, (title, found) in zip(shown, paces.items(), strict=True):
        apart = 2 < found.launches <= COUNTABLE
        started = (
            [(begin, stop - begin) for begin, stop in found.started]
            if apart
            else bars(found.started)
        )
        axes.broken_barh(
            started, (-0.38, 0.76), facecolor=ORANGE, edgecolor=PAPER, linewidth=0.6 if apart else 0
        )
        axes.broken_barh(
            [(0, found.step_us)], (0.62, 0.76), facecolor=PAPER, edgecolor=GREY, linewidth=0.6
        )
        # an edge would fill the gaps; without snap, a bar thinner than a pixel is a paler one, and none is lost
        for color, begin, stop in (
            (GREY, 0, found.before_us),
            (BLUE, found.before_us, found.step_us),
        ):
            own = [(max(since, begin), min(until, stop)) for since, until in found.worked
                   if since < stop and until > begin]
            axes.broken_barh(bars(own), (0.62, 0.76), facecolor=color, linewidth=0, snap=False)
        axes.axvline(found.step_us, color=INK, linewidth=1.6)
        axes.set_yticks([0, 1], ["CPU launches", "device"], fontsize=9)
        axes.set(ylim=(1.5, -0.5), xlim=(0, end if one_scale else 1.03 * found.step_us))
        axes.set_title(f"{title}: {found}", fontsize=9, loc="left", color=INK)
        lines.append(f"{title}: {found}")
    first = next(iter(paces.values()))
    before = [Patch(color=GREY, label=f"work before the {first.what}")] if first.before_us else []
    works = f"work of the {first.what}" if first.before_us else "the device works"
    legend = [
        Patch(color=ORANGE, label="the CPU launches"),
        *before,
        Patch(color=BLUE, label=works),
        Patch(facecolor=PAPER, edgecolor=GREY, label="the device waits"),
        Line2D([], [], color=INK, linewidth=1.6, label=f"end of the {first.what}"),
    ]
    figure.legend(
        handles=legend, loc="outside upper right", ncols=len(legend), fontsize=8, frameon=False
    )
    for axes in shown if first.before_us else ():
        axes.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g}")
    shown[-1].set_xlabel(f"{'ms' if first.before_us else 'µs'}, {first.source}", fontsize=9)
    text = [f"pace of a {first.what}, {first.source}", *lines]
    return finish(
        figure,
        "Launches of the CPU above the device's work, on one clock. " + "; ".join(lines) + ".",
        "\n".join(text),
    )
