"""The order of small graphs, and the memory of a step with updates at its end or early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, GREY, INK, LILAC, PAPER, RED, YELLOW
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.recipe.wording import aligned


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of a step. inputs: parameters, states and batch. curve: what is alive at each operator.

    places: where in the step each operator stands, from 0 to 1.
    """

    inputs: int
    curve: Sequence[int]
    places: Sequence[float]

    @property
    def peak(self) -> int:
        return max(self.curve)


KINDS = {"R": (LILAC, "R1: a matmul reads weight 1"), "G": (YELLOW, "G1: its gradient"), "U": (GREEN, "U1: its update")}


def operators_in_order(rows: Mapping[str, Sequence[str]], *, frames: bool = True) -> Picture:
    """A row for each graph, a box for each of its matmuls and updates, as `in_order` names them.

    A dashed line stands before the backward, and with `frames` a red one around a read that comes too late. Text: the
    names, one row below the other. Raises WorkbenchError without any row, or for a name of another kind.
    """
    if not rows or {name[0] for names in rows.values() for name in names} - {*KINDS, "|"}:
        raise WorkbenchError("operators_in_order: give one row or more, by title, of names with R, G, U or |")
    if not frames:
        rows = {title: [name.rstrip("!") for name in names] for title, names in rows.items()}
    figure, (axes,) = panels(9.6, 0.5 + 0.5 * len(rows))
    dashed: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.3}
    frame: dict[str, Any] = {"edgecolor": RED, "linewidth": 2.6}
    most = late = 0
    for y, names in enumerate(rows.values()):
        x = 0
        for name in names:
            if name == "|":
                axes.vlines(x, y - 0.5, y + 0.5, **dashed)
                continue
            color, _ = KINDS[name[0]]
            late += name.endswith("!")
            axes.add_patch(Rectangle((x + 0.07, y - 0.36), 0.86, 0.72, facecolor=color,
                                     **frame if name.endswith("!") else {}))
            axes.text(x + 0.5, y, name.rstrip("!"), ha="center", va="center", fontsize=10 if len(name) < 5 else 8,
                      color=PAPER if color == GREEN else INK)
            x += 1
        most = max(most, x)
    axes.set(xlim=(0, most), ylim=(len(rows) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles: list[Artist] = [Patch(facecolor=color, label=said) for color, said in KINDS.values()]
    handles += [Patch(facecolor=PAPER, **frame, label="too late")] if late else []
    handles.append(Line2D([], [], **dashed, label="the backward starts"))
    figure.legend(handles=handles, frameon=False, fontsize=9, ncols=len(handles), loc="outside upper right")
    said = [(title, " ".join(names)) for title, names in rows.items()]
    alt = "Operators in their order. " + "; ".join(map(": ".join, said)) + "."
    return finish(figure, alt, "\n".join(aligned(said)), colors=64)


def memory_of_steps(steps: Mapping[int, Mapping[str, Memory]]) -> Picture:
    """A panel for each number of tokens, a curve for each of its steps, three at most: all bytes that are alive.

    The axis starts where only parameters and states are. The dots are the peaks, with their GiB. Text: the peaks.
    """
    figure, shown = panels(9.6, 3.0, columns=len(steps), sharey=True)
    styles = [(GREY, "-", 4.5), (BLUE, "-", 1.8), (INK, ":", 1.8)]
    lines = [("", *next(iter(steps.values())))]
    for axes, (tokens, curves) in zip(shown, steps.items(), strict=True):
        title = f"{tokens:,} tokens"
        labels = dict[tuple[float, float], str]()
        for (said, found), (color, style, width) in zip(curves.items(), styles, strict=False):
            alive, share = [size / 2**30 for size in found.curve], [100 * x for x in found.places]
            axes.plot(share, alive, style, color=color, linewidth=width, label=said, drawstyle="steps-post")
            at = alive.index(max(alive))
            axes.plot(share[at], alive[at], "o", color=color, markersize=4 + width)
            labels[share[at], alive[at]] = f"{alive[at]:.2f}"  # one for equal peaks
        for place, label in labels.items():
            axes.annotate(label, place, (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=9,
                          color=INK)
        lines.append((title, *(f"{found.peak / 2**30:.2f}" for found in curves.values())))
        axes.set_title(title, fontsize=10, loc="left", color=INK)
        axes.set(xlim=(0, 102), xlabel="% of the step's operators, forward to update")
        axes.grid(axis="y", color=FAINT)
    inputs = min(found.inputs for curves in steps.values() for found in curves.values()) / 2**30
    shown[0].set(ylabel="GiB, with weights and states", ylim=inputs)
    figure.legend(*shown[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    text = "\n".join(["peak of the step, GiB, estimated", *aligned(lines)])
    return finish(figure, f"Memory along each step; {text}".replace("\n", "; "), text)
