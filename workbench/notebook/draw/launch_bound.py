"""The CPU's launches above the device that executes them."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.errors import WorkbenchError
from workbench.graph.read.launch_bound import Pace
from workbench.notebook.draw.colors import BLUE, GREY, INK, ORANGE, PAPER
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.notebook.draw.timeline import bars

COUNTABLE = 60  # launches that are drawn one by one, with white edges; more of them are one bar


def pace(paces: Mapping[str, Pace]) -> Picture:
    """A panel for each step, under its title, on one scale: launches above, the device's work below.

    Raises WorkbenchError without any step.
    """
    if not paces:
        raise WorkbenchError("draw.pace: give one step or more, by title: {\"node by node\": paced(...)}")
    figure, shown = panels(9.6, 0.95 + 1.15 * len(paces), len(paces), sharex=True)
    end = 1.03 * max(found.step_us for found in paces.values())
    lines = []
    for axes, (title, found) in zip(shown, paces.items(), strict=True):
        apart = 2 < found.launches <= COUNTABLE
        started = [(begin, stop - begin) for begin, stop in found.started] if apart else bars(found.started)
        axes.broken_barh(started, (-0.38, 0.76), facecolor=ORANGE, edgecolor=PAPER, linewidth=0.6 if apart else 0)
        axes.broken_barh([(0, found.step_us)], (0.62, 0.76), facecolor=PAPER, edgecolor=GREY, linewidth=0.6)
        # an edge would fill the gaps; without snap, a bar thinner than a pixel is a paler one, and none is lost
        axes.broken_barh(bars(found.worked), (0.62, 0.76), facecolor=BLUE, linewidth=0, snap=False)
        axes.axvline(found.step_us, color=INK, linewidth=1.6)
        axes.set_yticks([0, 1], ["CPU launches", "device"], fontsize=9)
        axes.set(ylim=(1.5, -0.5), xlim=(0, end))
        axes.set_title(f"{title}: {found}", fontsize=9, loc="left", color=INK)
        lines.append(f"{title}: {found}")
    legend = [Patch(color=ORANGE, label="the CPU launches"), Patch(color=BLUE, label="the device works"),
              Patch(facecolor=PAPER, edgecolor=GREY, label="the device waits"),
              Line2D([], [], color=INK, linewidth=1.6, label="end of the step")]
    figure.legend(handles=legend, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    shown[-1].set_xlabel(f"µs, {next(iter(paces.values())).source}", fontsize=9)
    text = [f"pace of a step, {next(iter(paces.values())).source}", *lines]
    return finish(figure, "Launches of the CPU above the device's work, on one clock. " + "; ".join(lines) + ".",
                  "\n".join(text))
