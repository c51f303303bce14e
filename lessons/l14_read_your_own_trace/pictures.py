"""A traced step: its kernels over time, and the times of many steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import BLUE, FAINT, GREY, INK, ORANGE, PAPER
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.notebook.draw.timeline import bars
from workbench.pipeline.gpu_communication import COMPUTE, gaps, kind_of, union
from workbench_lessons.l05_bucket_and_overlap.stacked import EXPOSED, IDLE

NAMED = 20
"""Up to so many kernels in a lane, each has its own bar; up to so many in a step, with the last word of its name."""


def kernels_over_time(steps: Mapping[str, Sequence[tuple[str, int, float, float, float]]]) -> Picture:
    """A panel for each step, on one clock: kernels that compute above, collectives below.

    steps: by title, kernels as (name, stream, launched, begin, end) in microseconds. Hatched: only a collective runs.
    Dotted: nothing runs. Raises WorkbenchError without any kernel.
    """
    if not steps or not all(steps.values()):
        raise WorkbenchError("kernels_over_time: give one step or more, by title, each with a kernel")
    figure, shown = panels(9.6, 0.8 + 1.0 * len(steps), len(steps), sharex=True)
    last = max(end for listed in steps.values() for *_, end in listed)
    unit, per = ("ms", 1e3) if last > 5e3 else ("µs", 1.0)
    lines = []
    for axes, (title, listed) in zip(shown, steps.items(), strict=True):
        compute = [s for s in listed if kind_of(s[0]) == COMPUTE]
        talk = [s for s in listed if kind_of(s[0]) != COMPUTE]
        busy, talking = union((b, e) for *_, b, e in compute), union((b, e) for *_, b, e in talk)
        every = union((b, e) for *_, b, e in listed)
        exposed = [gap for begin, end in talking for gap in gaps(busy, begin, end)]
        idle = list(gaps(every, every[0][0], every[-1][1]))
        for row, own, color in ((0, compute, BLUE), (1, talk, ORANGE)):
            apart = len(own) <= NAMED
            found = [(b, e - b) for *_, b, e in own] if apart else bars((b, e) for *_, b, e in own)
            axes.broken_barh([(b / per, ms / per) for b, ms in found], (row - 0.38, 0.76), facecolor=color,
                             edgecolor=PAPER, linewidth=(0.6, 1.4)[row] if apart else 0, snap=apart)
            for name, *_, begin, end in own if len(listed) <= NAMED else ():
                axes.text((begin + end) / 2 / per, row, name.split()[-1], ha="center", va="center", fontsize=9,
                          color=PAPER if color == BLUE else INK)
        for found, (low, high), look in ((exposed, (-0.38, 0.76), EXPOSED), (idle, (-0.38, 1.76), IDLE)):
            axes.broken_barh([(b / per, (e - b) / per) for b, e in found], (low, high), **look)
        axes.set_yticks([0, 1], _lanes(compute, talk), fontsize=9)
        axes.set(ylim=(1.5, -0.5), xlim=(0, 1.02 * last / per))
        parts = [f"{what} {sum(e - b for b, e in found) / per:,.{2 if per > 1 else 0}f} {unit}"
                 for what, found in (("compute", busy), ("exposed", exposed), ("idle", idle))]
        lines.append(f"{title}: {', '.join(parts)}")
        axes.set_title(lines[-1], fontsize=9, loc="left", color=INK)
    legend = [Patch(color=BLUE, label="compute"), Patch(color=ORANGE, label="collective"),
              Patch(**EXPOSED, label="exposed: only a collective runs"), Patch(**IDLE, label="idle: nothing runs")]
    figure.legend(handles=legend, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    shown[-1].set_xlabel(unit, fontsize=9)
    return finish(figure, "Kernels over time, compute above collectives. " + "; ".join(lines) + ".", "\n".join(lines))


def _lanes(*both: Sequence[tuple[str, int, float, float, float]]) -> list[str]:
    """What the two lanes do, with their streams if each is one."""
    streams = [sorted({s[1] for s in own}) for own in both]
    one_each = all(len(found) == 1 for found in streams)
    return [f"stream {found[0]}: {what}" if one_each else what
            for what, found in zip(("computes", "communicates"), streams, strict=True)]


def dots(rows: Mapping[str, tuple[Sequence[float], Sequence[float]]], unit: str = "ms") -> Picture:
    """A row of timed steps as dots with their median, below the traced steps' lengths as crosses: (timed, traced)."""
    if not rows or not all(timed for timed, _ in rows.values()):
        raise WorkbenchError("dots: give one row or more, each with a timed step")
    figure, (axes,) = panels(9.6, 0.95 + 0.48 * len(rows))
    axes.set_facecolor(PAPER)
    lines = []
    for y, (title, (timed, traced)) in enumerate(rows.items()):
        axes.axhline(y, color=FAINT, linewidth=6, zorder=0)
        axes.plot(timed, [y] * len(timed), "o", color=GREY, alpha=0.45, markersize=5, markeredgewidth=0)
        axes.plot([median(timed)], [y], "|", color=INK, markersize=15, markeredgewidth=2)
        axes.plot(traced, [y - 0.33] * len(traced), "x", color=INK, markersize=7, markeredgewidth=2)
        lines.append(f"{title}: {len(timed)} timed steps, {len(traced)} traced")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.6))
    axes.set_xlabel(unit, fontsize=9)
    looks: dict[str, dict[str, Any]] = {
        "a timed step": {"marker": "o", "color": GREY, "alpha": 0.6},
        "their median": {"marker": "|", "color": INK, "markersize": 11, "markeredgewidth": 2},
        "a traced step": {"marker": "x", "color": INK, "markeredgewidth": 2}}
    legend = [Line2D([], [], linestyle="", label=label, **look) for label, look in looks.items()]
    figure.legend(handles=legend, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    return finish(figure, "Dots for the times of steps, by variant. " + "; ".join(lines) + ".", "\n".join(lines))
