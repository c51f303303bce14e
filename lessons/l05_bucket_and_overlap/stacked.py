"""Bars made of parts: milliseconds by kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, PAPER, PINK, RED, SKY, YELLOW
from workbench.notebook.draw.picture import Picture, finish, panels

EXPOSED: dict[str, Any] = {
    "facecolor": "#fbe3d4",
    "edgecolor": RED,
    "hatch": "////",
    "linewidth": 0,
}
IDLE: dict[str, Any] = {"facecolor": PAPER, "edgecolor": GREY, "hatch": "....", "linewidth": 0}
PALETTE = ("#004c7f", SKY, GREEN, YELLOW, PINK)
"""By kind. Its first blue is darker than that of all compute."""


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str = "ms", *,
            line: tuple[str, float] | None = None) -> Picture:
    """A bar for each row, made of its parts: the same parts in each row; "idle" is dotted, "exposed" hatched.

    line: name and value of a dashed line to compare the bars with; it is in the picture alone.
    """
    if not rows or len({tuple(parts) for parts in rows.values()}) > 1:
        raise WorkbenchError("stacked: give one row or more, each with the same parts")
    figure, (axes,) = panels(9.6, 0.95 + 0.4 * len(rows))
    names = next(iter(rows.values()))
    plain = [name for name in names if name not in ("idle", "exposed")]
    looks: dict[str, dict[str, Any]] = {
        name: {"color": PALETTE[i % len(PALETTE)]} for i, name in enumerate(plain)
    }
    looks |= {"idle": IDLE, "exposed": EXPOSED, "compute": {"color": BLUE}}
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for name, value in parts.items():
            axes.barh(y, value, 0.7, left=left, **looks[name])
            left += value
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel(unit, fontsize=9)
    handles: list[Artist] = [Patch(**looks[name], label=name) for name in names]
    if line:
        axes.axvline(line[1], color=INK, linestyle="--", linewidth=1)
        handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1, label=line[0]))
    figure.legend(
        handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8, frameon=False
    )
    lines = [f"{row}: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
             for row, parts in rows.items()]
    return finish(figure, f"Bars of {unit} by kind. " + "; ".join(lines) + ".", "\n".join(lines))
