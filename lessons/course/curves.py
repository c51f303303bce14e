"""Curves of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK
from workbench.notebook.draw.picture import Picture, finish, panels


def curves(runs: Mapping[str, Sequence[float]], title: str, label: str = "loss", *, at: Sequence[float] = (),
           axis: str = "step", colors: Sequence[str] = (BLUE, GREEN, GREY),
           mark: tuple[str, float] | None = None) -> Picture:
    """The loss of each run over its steps, or what `label` says, at most three runs; orange stays free for faults.

    at, axis: where the values lie and of what, if not at steps 1, 2, 3. colors: of the runs, for a page where blue or
    green means something else. mark: name and place of a vertical line; it is in the picture alone.
    """
    figure, (axes,) = panels(8, 3.0)
    looks = zip(runs.items(), colors, ("-", "--", ":"), (5, 1.2, 1.2), (0.35, 1, 1), strict=False)
    for (name, values), color, line, width, alpha in looks:  # the first may lie below another
        axes.plot(at or range(1, len(values) + 1), values, line, color=color, linewidth=width, alpha=alpha, label=name,
                  marker="o" if at else "", markersize=4)
    axes.set(xlabel=axis, ylabel=label)
    if mark:
        axes.axvline(mark[1], color=INK, linestyle="--", linewidth=1, label=mark[0])
    if at:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, color=INK)
    # never on a curve
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    points = {name: ", ".join(f"{y:.0f} at {x:,}" for x, y in zip(at, values, strict=True)) if at
              else f"{len(values)} {axis}s" for name, values in runs.items()}
    text = f"{title}: " + "; ".join(f"{name}, {said}" for name, said in points.items())
    return finish(figure, f"Curves of the {label}. {text}.", text, colors=64)
