"""Bytes alive along the graphs, with the tensors that hold the peak; bytes saved against work computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import MemoryProfile, live_bytes
from workbench.notebook.draw.colors import BLUE, GREY, INK, PINK, RED, SKY
from workbench.notebook.draw.graphs import by_title
from workbench.notebook.draw.picture import Picture, finish, panels, shortened
from workbench.tools.timing.memory_plan import Planned

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


def memory(what: GraphModule | ForwardBackward | PassRecord, measured: int | None = None) -> Picture:
    """Estimated live bytes in node order. Each graph begins with its inputs: parameters, or saved tensors.

    `measured`: the peak in bytes that a GPU reported, drawn as a line beside the estimate.
    """
    found = live_of(what)
    figure, (axes, names) = panels(9.6, 3.1, columns=2, width_ratios=(2.4, 1))
    lines = []
    for (title, live), color in zip(found.items(), CURVES[-len(found):], strict=True):
        curve = [size / 2**20 for size in live.curve]
        axes.fill_between(range(len(curve)), curve, step="mid", color=color, alpha=0.25, linewidth=0)
        axes.plot(curve, color=color, linewidth=1.2, drawstyle="steps-mid", label=title)
        part, top = live.peak
        axes.plot([curve.index(max(curve))], [top.peak_bytes / 2**20], "v", markersize=9, zorder=5,
                  color=color if len(found) > 1 else RED, markeredgecolor=INK if len(found) > 1 else RED)
        lines.append(f"{title}: peak {top.peak_bytes:,} B in the {part} at {top.peak_node}, "
                     f"{top.input_bytes:,} B of it inputs")
    for start, said, color, left in begins(found):
        if start:
            axes.axvline(start, color=color or GREY, linestyle="--", linewidth=0.9)
        axes.text(start, 1.0, f" {said} ", transform=axes.get_xaxis_transform(), fontsize=8.5, va="bottom",
                  ha="right" if left else "left", style="italic", color=color or INK)
    if measured is not None:
        axes.axhline(measured / 2**20, color=INK, linestyle=":", linewidth=1.2, label="measured peak")
    axes.set(xlabel="nodes, in their order, inputs first", ylabel="MiB alive", ylim=(0, None),
             xlim=(0, max(len(live.curve) for live in found.values())))
    if len(found) > 1 or measured is not None:
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    _, top = list(found.values())[-1].peak
    _holders(names, top, "the blue peak" if len(found) > 1 else "the peak")
    lines += [f"  {size:,} B  {name}  {module}".rstrip() for name, size, module in top.holders]
    alt = "Estimated memory along the graph. " + "; ".join(line.strip() for line in lines) + "."
    return finish(figure, alt, "\n".join(lines), colors=64 if len(found) > 1 else 0)


def begins(found: Mapping[str, Live]) -> list[tuple[int, str, str, bool]]:
    """(node, words, colour, whether the words stand left of it) where each part begins; "" is the ink's colour."""
    starts = {sum(len(profile.curve) for profile in list(live.parts.values())[:i]): (part, title)
              for title, live in found.items() for i, part in enumerate(live.parts)}
    longest = max(len(live.curve) for live in found.values())
    several = len(starts) > max(len(live.parts) for live in found.values())  # a pass moved where a part begins
    return [(start, f"{title.split(' ')[0]}: {part} begins" if several and start else part,
             CURVES[list(found).index(title)] if several and start else "",
             bool(start) and any(start < other < start + 0.3 * longest for other in starts))  # beside another
            for start, (part, title) in starts.items()]


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


def pareto(found: Planned) -> Picture:
    """Bytes saved against time computed again: plans and torch's own budgets, of `memory_plan(..., front=True)`."""
    figure, (axes,) = panels(7.6, 3.4)
    sets = {"plans": (BLUE, "o-", [(p.saved_bytes / 2**20, p.ms) for p in found.front]),
            "torch's budgets": (RED, "s", [(c.bytes / 2**20, c.ms) for c in found.torch_front])}
    lines = []
    for name, (color, marker, points) in sets.items():
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=5, linewidth=1.4, label=name)
            lines += [f"{name}: " + ", ".join(f"{x:,.0f} MiB {y:.2f} ms" for x, y in points)]
    axes.plot([found.plan.saved_bytes / 2**20], [found.plan.ms], "o", markersize=12, markerfacecolor="none",
              markeredgecolor=INK, markeredgewidth=1.5, label="the plan of this recipe", linestyle="none")
    if found.torch_front:
        most = max(found.torch_front, key=lambda cut: cut.bytes)
        axes.annotate("no budget", (most.bytes / 2**20, most.ms), (5, 5), textcoords="offset points", fontsize=8)
    far = max(x for _, _, points in sets.values() for x, _ in points)
    axes.set(xlabel="MiB saved for the backward", ylabel="ms computed again", xlim=(-0.03 * far, None))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    title = f"{found.recipe}, estimated for {found.plan.device.partition(',')[0]}"
    axes.set_title(title, fontsize=9)
    return finish(figure, f"Memory against time: {title}. " + "; ".join(lines) + ".", "\n".join([title, *lines]),
                  colors=64)


def unbeaten(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names of the points than which no other is less in one figure and no more in the other, by the first."""
    return [name for name, (x, y) in sorted(points.items(), key=lambda point: point[1])
            if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points.values())]


def frontier(points: Mapping[str, tuple[float, float]], marked: Mapping[str, str], x: str, y: str) -> Picture:
    """A point for each name, a line and labels for the unbeaten ones, a ring and a label for the names in `marked`.

    x, y: what the figures are. Text: the unbeaten points, and the marked ones. KeyError for an unknown marked name.
    """
    figure, (axes,) = panels(7.2, 3.2)
    best = unbeaten(points)
    xs, ys = zip(*points.values(), strict=True)
    axes.scatter(xs, ys, color=GREY, s=28, zorder=2, label="a choice")
    axes.plot(*zip(*(points[name] for name in best), strict=True), color=BLUE, marker="o", drawstyle="steps-post",
              zorder=3, label="no other is better in both")
    at: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        at.setdefault(point, []).append(name)
    for (name, label), color in zip(marked.items(), (PINK, SKY) * len(marked), strict=False):
        axes.plot(*points[name], "o", markersize=12, markerfacecolor="none", markeredgecolor=color,
                  markeredgewidth=2.5, zorder=4)
        axes.annotate(label, points[name], (9, 9), textcoords="offset points", fontsize=9)
    told = {points[name] for name in marked}
    for point, names in at.items():
        if point in told:
            continue
        if names[0] in best:
            axes.annotate(" or ".join(names), point, (9, 9), textcoords="offset points", fontsize=9)
        elif len(names) > 1:
            axes.annotate(f"{len(names)} choices", point, (6, 4), textcoords="offset points", fontsize=8, color=GREY)
    most, worst = max(xs) or 1, max(ys) or 1
    axes.set(xlabel=x, ylabel=y, xlim=(-0.05 * most, 1.2 * most), ylim=(-0.06 * worst, 1.2 * worst))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    rows = [f"{name}: {points[name][0]:,} {x}, {points[name][1]:,} {y}" for name in best]
    rows += [f"{label} ({name}): {points[name][0]:,} {x}, {points[name][1]:,} {y}" for name, label in marked.items()]
    text = "\n".join([f"{len(points)} choices, {len(best)} of them unbeaten", *rows])
    return finish(figure, f"Points of {x} against {y}. " + "; ".join(rows) + ".", text)
