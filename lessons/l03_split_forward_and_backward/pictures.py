"""Bytes saved against work computed again."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.notebook.draw.colors import BLUE, GREY, PINK, SKY
from workbench.notebook.draw.picture import Picture, finish, panels


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
              zorder=3, label="fewest bytes for its FLOP")
    at: dict[tuple[float, float], list[str]] = {}
    for name, point in points.items():
        at.setdefault(point, []).append(name)
    for (name, label), color in zip(marked.items(), (PINK, SKY) * len(marked), strict=False):
        axes.plot(*points[name], "o", markersize=12, markerfacecolor="none", markeredgecolor=color,
                  markeredgewidth=2.5, zorder=4)
        shown = ",\nand ".join([label, *(other for other in at[points[name]] if other != name)])
        axes.annotate(shown, points[name], (9, 9), textcoords="offset points", fontsize=9)
    told = {points[name] for name in marked}
    for point, names in at.items():
        if point in told:
            continue
        if names[0] in best:
            axes.annotate(" or ".join(names), point, (9, 9), textcoords="offset points", fontsize=9)
        else:
            label = f"{len(names)} choices" if len(names) > 1 else names[0]
            axes.annotate(label, point, (6, 4), textcoords="offset points", fontsize=8, color=GREY)
    most, worst = max(xs) or 1, max(ys) or 1
    axes.set(xlabel=x, ylabel=y, xlim=(-0.05 * most, 1.2 * most), ylim=(-0.06 * worst, 1.2 * worst))
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    rows = [f"{name}: {points[name][0]:,} {x}, {points[name][1]:,} {y}" for name in best]
    rows += [f"{label} ({name}): {points[name][0]:,} {x}, {points[name][1]:,} {y}" for name, label in marked.items()]
    text = "\n".join([f"{len(points)} choices, {len(best)} of them unbeaten", *rows])
    return finish(figure, f"Points of {x} against {y}. " + "; ".join(rows) + ".", text)
