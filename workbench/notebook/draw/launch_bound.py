"""The CPU's launches above the device that executes them."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.errors import WorkbenchError
from workbench.graph.read.launch_bound import Pace
from workbench.notebook.draw.picture import BLUE, GREEN, INK, ORANGE, RED, Picture, finish, panels
from workbench.notebook.draw.timeline import bars


def pace(paces: Mapping[str, Pace]) -> Picture:
    """A panel for each step, under its title, on one scale: launches above, the device's work below.

    Raises WorkbenchError without any step.
    """
    if not paces:
        raise WorkbenchError("draw.pace: give one step or more, by title: {\"node by node\": paced(...)}")
    figure, shown = panels(9.6, 0.7 + 1.15 * len(paces), len(paces), sharex=True)
    end = 1.03 * max(found.step_us for found in paces.values())
    lines = []
    for axes, (title, found) in zip(shown, paces.items(), strict=True):
        bound = found.bound == "launches"
        color = BLUE if bound else GREEN  # the edge makes a kernel of a microsecond visible
        axes.broken_barh(bars(found.started), (-0.38, 0.76), color=ORANGE, linewidth=0)
        axes.broken_barh(bars(found.worked), (0.62, 0.76), facecolor=color, edgecolor=color, linewidth=0.25)
        axes.axvline(found.step_us, color=RED, linewidth=1.2)
        axes.set_yticks([0, 1], ["CPU starts", "device works"], fontsize=9)
        axes.set(ylim=(1.5, -0.5), xlim=(0, end))
        axes.set_title(f"{title}: {found}", fontsize=9.5, loc="left", color=INK)
        lines.append(f"{title}: {found}")
    shown[-1].set_xlabel(f"µs, {next(iter(paces.values())).source}; the red line is the end of the step", fontsize=9)
    text = [f"pace of a step, {next(iter(paces.values())).source}", *lines]
    return finish(figure, "Launches of the CPU above the device's work, on one clock. " + "; ".join(lines) + ".",
                  "\n".join(text))
