"""Bytes alive along the graphs, with the tensors that hold the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.peak import MemoryProfile, live_bytes
from workbench.notebook.draw.colors import BLUE, GREY, INK, RED
from workbench.notebook.draw.graphs import by_title
from workbench.notebook.draw.picture import Picture, finish, panels, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOLDERS = 6
CURVES = GREY, BLUE
"""The colours before and after a pass; a single curve has the last."""


@dataclass(frozen=True)
class Live:
    """The profiles of the graphs of a step, by part."""

    parts: Mapping[str, MemoryProfile]

    @property
    def peak(self) -> tuple[str, MemoryProfile]:
        return max(self.parts.items(), key=lambda item: item[1].peak_bytes)

    @property
    def curve(self) -> list[int]:
        return [size for profile in self.parts.values() for size in profile.curve]


def live_of(what: GraphModule | ForwardBackward | PassRecord) -> dict[str, Live]:
    """The profiles to draw, by title: of a pass's record, before and after it."""
    return {title: Live({part: live_bytes(gm, HOLDERS) for part, gm in graphs.items()})
            for title, graphs in by_title(what, "graph").items()}


def memory(
    what: GraphModule | ForwardBackward | PassRecord, measured: int | None = None
) -> Picture:
    """Estimated live bytes in node order. Each graph begins with its inputs: parameters, or saved tensors.

    `measured`: the peak in bytes that a GPU reported, drawn as a line beside the estimate.
    """
    lives = live_of(what)
    figure, (axes, names) = panels(9.6, 3.1, columns=2, width_ratios=(2.4, 1))
    lines = []
    for (title, live), color in zip(lives.items(), CURVES[-len(lives):], strict=True):
        curve = [size / 2**20 for size in live.curve]
        axes.fill_between(
            range(len(curve)), curve, step="mid", color=color, alpha=0.25, linewidth=0
        )
        axes.plot(curve, color=color, linewidth=1.2, drawstyle="steps-mid", label=title)
        part, top = live.peak
        axes.plot([curve.index(max(curve))], [top.peak_bytes / 2**20], "v", markersize=9, zorder=5,
                  color=color if len(lives) > 1 else RED, markeredgecolor=INK if len(lives) > 1 else RED)
        lines.append(f"{title}: peak {top.peak_bytes:,} B in the {part} at {top.peak_node}, "
                     f"{top.input_bytes:,} B of it inputs")
    for start, said, color, left in begins(lives):
        if start:
            axes.axvline(start, color=color or GREY, linestyle="--", linewidth=0.9)
        axes.text(start, 1.0, f" {said} ", transform=axes.get_xaxis_transform(), fontsize=8.5, va="bottom",
                  ha="right" if left else "left", style="italic", color=color or INK)
    if measured is not None:
        axes.axhline(
            measured / 2**20, color=INK, linestyle=":", linewidth=1.2, label="measured peak"
        )
    axes.set(xlabel="nodes, in their order, inputs first", ylabel="MiB alive", ylim=(0, None),
             xlim=(0, max(len(live.curve) for live in lives.values())))
    if len(lives) > 1 or measured is not None:
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    _, top = list(lives.values())[-1].peak
    _holders(names, top, "the blue peak" if len(lives) > 1 else "the peak")
    lines += [f"  {size:,} B  {name}  {module}".rstrip() for name, size, module in top.holders]
    alt = "Estimated memory along the graph. " + "; ".join(line.strip() for line in lines) + "."
    return finish(figure, alt, "\n".join(lines), colors=64 if len(lives) > 1 else 0)


def begins(lives: Mapping[str, Live]) -> list[tuple[int, str, str, bool]]:
    """(node, words, colour, whether the words stand left of it) where each part begins; "" is the ink's colour."""
    starts = {sum(len(profile.curve) for profile in list(live.parts.values())[:i]): (part, title)
              for title, live in lives.items() for i, part in enumerate(live.parts)}
    longest = max(len(live.curve) for live in lives.values())
    # a pass moved where a part begins
    several = len(starts) > max(len(live.parts) for live in lives.values())
    return [
        (
            start,
            f"{title.split(' ')[0]}: {part} begins" if several and start else part,
            CURVES[list(lives).index(title)] if several and start else "",
            bool(start) and any(start < other < start + 0.3 * longest for other in starts),
        )  # beside another
        for start, (part, title) in starts.items()
    ]


def _holders(axes: Axes, top: MemoryProfile, peak: str) -> None:
    sizes = [size / 2**20 for _, size, _ in top.holders]
    axes.barh(range(len(sizes)), sizes, 0.72, color="#bfdcee")
    for i, (name, _, module) in enumerate(top.holders):
        said = f"{shortened(name, 26, 16)}  {sizes[i]:.2f}\n{shortened(module, 34)}".rstrip()
        axes.text(0, i, said, va="center", fontsize=7.5, linespacing=1.1, color=INK)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel(f"MiB held at {peak} ▼", fontsize=9)
    axes.spines["left"].set_visible(False)
