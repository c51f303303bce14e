"""From where a CUDA graph reads its inputs, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import FancyBboxPatch, Patch

from workbench.errors import WorkbenchError
from workbench.graph.read.replay import Replay
from workbench.notebook.draw.colors import FAINT, GREY, INK, PAPER, YELLOW
from workbench.notebook.draw.picture import Picture, finish, new_figure, shortened
from workbench.passes.cudagraph import CUDAGraphRunner
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import few

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST = 60
"""The most inputs in one picture."""


def addresses(record: PassRecord, names: Mapping[str, str]) -> Picture:
    """From where each CUDA graph reads its inputs: at their own address, or in a copy that belongs to the recording.

    An input that lies in the memory of an earlier graph names it: that graph's copy, or its result. names: what to call
    inputs of the graphs that are no parameters.

    Raises WorkbenchError for the record of another pass, and where there are more than MOST inputs.
    """
    found = recorded(record)
    if (count := sum(len(f.inputs) for f in found)) > MOST:
        raise WorkbenchError(f"{count:,} inputs are too many for a picture")
    high = sum(len(f.inputs) + 0.7 for f in found)
    figure = new_figure(9.6, 0.5 + 0.34 * high)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(high - 0.35, -0.6))
    axes.axis("off")
    top, lines = 0.0, ["addresses of the CUDA graphs"]
    for i, f in enumerate(found):
        origins = _origins(f, found[:i])
        labels = {x.name: x.parameter or names.get(x.name, x.name) for x in f.inputs}
        rows = max(len(f.inputs), 1)
        _box(axes, 7.2, top + (rows - 1) / 2, 1.5, rows - 0.25, f"{f.graph}:\nCUDA graph", FAINT)
        _box(axes, 9.3, top + (rows - 1) / 2, 1.2, rows - 0.25, "results", YELLOW)
        _arrow(axes, 7.95, 8.7, top + (rows - 1) / 2)
        for y, x in enumerate(f.inputs):
            text = shortened(labels[x.name], 30) + origins.get(x.name, "")
            _box(axes, 1.4, top + y, 2.6, 0.72, text, YELLOW if x.static else PAPER)
            if x.static:
                _arrow(axes, 2.7, 6.45, top + y)
            else:
                _box(axes, 4.6, top + y, 1.7, 0.72, "copy", YELLOW)
                _arrow(axes, 2.7, 3.75, top + y)
                _arrow(axes, 5.45, 6.45, top + y)
        lines.append(f"{f.graph}: reads {few([labels[x.name] for x in f.static], 6) or 'no input'} in place; "
                     f"copies {few([labels[x.name] for x in f.copied], 6) or 'no input'}")
        top += rows + 0.7
    figure.legend(handles=[Patch(facecolor=YELLOW, edgecolor=GREY, label="at the same address in each replay"),
                           Patch(facecolor=PAPER, edgecolor=GREY, label="elsewhere in each step")],
                  loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return finish(figure, "Inputs on the left, CUDA graphs on the right. " + "; ".join(lines[1:]) + ".",
                  "\n".join(lines))


def _origins(graph: Replay, earlier: Sequence[Replay]) -> dict[str, str]:
    """By static inputs in the memory of an earlier graph: what they are there, as the picture says it."""
    copies = {x.name: f.graph for f in earlier for x in f.copied}
    others = {x.name for f in earlier for x in f.static}  # buffers, which their module holds
    return {x.name: f", {copies[x.name]}'s copy" if x.name in copies else f", {earlier[-1].graph}'s result"
            for x in graph.static if earlier and not x.parameter and x.name not in others}


def _box(axes: Axes, x: float, y: float, wide: float, high: float, text: str, fill: str) -> None:
    axes.add_patch(FancyBboxPatch((x - wide / 2, y - high / 2), wide, high, boxstyle="round,pad=0,rounding_size=0.08",
                                  facecolor=fill, edgecolor=GREY, linewidth=0.8))
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


def _arrow(axes: Axes, start: float, end: float, y: float) -> None:
    axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0})


def recorded(record: PassRecord) -> list[Replay]:
    """The CUDA graphs of a pass's record. Raises WorkbenchError for the record of another pass."""
    made: list[Any] = [body for body in record.after if isinstance(body, CUDAGraphRunner)]
    if not made:
        raise WorkbenchError(
            f"pass {record.name!r} records no CUDA graph: give the record of cudagraph"
        )
    return [body.facts for body in made]
