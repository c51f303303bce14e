"""Where each rank stood when a call failed: a lane for each rank, a box for each collective that it launched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from workbench.notebook.draw.colors import GREEN, GREY, INK, ORANGE, PAPER, RED
from workbench.notebook.draw.picture import Picture, finish, panels, shortened
from workbench.tools.compatibility import results_dir
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import RankError, ranks_text

WIDE, HIGH = 0.94, 0.66
LATER: dict[str, Any] = {"facecolor": PAPER, "edgecolor": GREY, "linestyle": ":"}
NEVER: dict[str, Any] = {"facecolor": PAPER, "edgecolor": RED, "linewidth": 1.8}


def lanes(error: RankError, order: Mapping[int, Sequence[str]] | None = None, *, last: int = 6) -> Picture:
    """The last collectives of each rank, in the order in which the rank launched them, and who waits for whom.

    Green: the rank has left it. Orange: the rank waits in it. An arrow leads from a rank that waits to each rank that
    has not launched this collective, or another operator in its place. On the right: what the rank did in the end, in
    red where it raised or left others waiting. A rank that could not tell what it launched has an empty lane.

    order: the axes over which each rank should all-reduce. The lane of a rank that waits then goes on in this order,
    dotted; what a rank that has ended left out has a red frame.
    """
    ranks = sorted({*error.launches, *(failure.rank for failure in error.failures)})
    told = {rank: tuple(error.launches.get(rank, ()))[-last:] for rank in ranks}
    edges = waits_for(error.launches)
    ends = {rank: _end(error, rank, edges.get(rank, ())) for rank in ranks}
    later = {rank: tuple(order[rank][len(error.launches.get(rank, ())):]) if order and rank in edges else ()
             for rank in ranks}
    rows: dict[int, list[Launch | str]] = {
        rank: [*told[rank]] if rank in edges or not order else _with_left_out(told[rank], order[rank])
        for rank in ranks}
    awaited = {other for others in edges.values() for other in others}
    drawn = [launch for own in told.values() for launch in own]
    several = len({launch.group for launch in drawn}) > 1
    lined = len({launch.stack[0][1] for launch in drawn if launch.stack}) > 1
    columns = max([1, *(len(rows[rank]) + len(later[rank]) for rank in ranks)])
    wide = min(2.2, 7.0 / columns)  # inches; 2.9 are for the names of the ranks, the arrows and the ends
    figure, (axes,) = panels(wide * columns + 2.9, 0.75 + (0.68 if several or lined else 0.5) * len(ranks))
    lines = []
    for row, rank in enumerate(ranks):
        said: list[str] = []
        for launch in rows[rank]:
            if isinstance(launch, str):
                _box(axes, len(said), row, f"all_reduce\nover {launch}", NEVER)
                said.append(f"never launched all_reduce over {launch}")
                continue
            _box(axes, len(said), row, _label(launch, several, lined), {"facecolor": GREEN if launch.done else ORANGE})
            said.append(("" if launch.done else "waits in ") + _label(launch, several, lined, ", "))
        for axis in later[rank]:
            _box(axes, len(said), row, f"all_reduce\nover {axis}", LATER)
            said.append(f"later all_reduce over {axis}")
        blamed = rank not in edges and (rank in awaited or ends[rank] != "returned")
        axes.text(columns + 0.95 / wide, row + HIGH / 2, ends[rank], va="center", fontsize=11,
                  color=RED if blamed else INK, weight="bold" if blamed else "normal")
        lines.append(f"rank {rank}: {'; '.join([*said, ends[rank]])}")
    _arrows(axes, edges, ranks, columns + 0.45 / wide)
    axes.set(xlim=(0, columns + 2.1 / wide), ylim=(len(ranks) - 0.2, -0.15), xticks=[])
    axes.set_yticks([row + HIGH / 2 for row in range(len(ranks))], [f"rank {rank}" for rank in ranks], fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    kinds = [(any(launch.done for launch in drawn), Patch(facecolor=GREEN, label="has left it")),
             (bool(edges), Patch(facecolor=ORANGE, label="waits in it")),
             (any(later.values()), Patch(**LATER, label="not reached")),
             (any(isinstance(launch, str) for own in rows.values() for launch in own),
              Patch(**NEVER, label="never launched")),
             (bool(edges), Line2D([], [], color=RED, marker=">", label="waits for"))]
    axes.legend(handles=[patch for here, patch in kinds if here], frameon=False, fontsize=10.5, ncols=5,
                handlelength=1.3, columnspacing=1.1, loc="lower left", bbox_to_anchor=(-0.01, 1))
    return finish(figure, "A lane for each rank: what it launched, in order. " + "; ".join(lines) + ".",
                  "\n".join(["where each rank stands", *lines]), colors=256)


def recorded_hang() -> str:
    """The report of a hang on four GPUs: rank 0 broadcasts where the others are in a barrier."""
    recorded = json.loads((results_dir() / "notebook_10_h200x4.json").read_text())
    hung = next(row["output"] for row in recorded["rows"] if "gave no answer" in row["output"])
    report = "\n\n".join(hung.split("\n\n")[:2])
    gpus = recorded["machine"]["gpus"]
    where = f"recorded on {len(gpus)} {gpus[0]}, torch {recorded['versions']['torch']}, {recorded['date']}"
    return re.sub(r"(, called from|, in) <module> \(cell \d+, line \d+\)", "", report) + f"\n\n{where}"


def waits_for(launches: Mapping[int, Sequence[Launch]]) -> dict[int, list[int]]:
    """For each rank that waits the ranks that have not launched its collective, or another operator in its place."""
    ops = {rank: {(launch.group, launch.number): launch.op for launch in own} for rank, own in launches.items()}
    last = {rank: own[-1] for rank, own in launches.items() if own and not own[-1].done}
    return {rank: [member for member in launch.ranks
                   if member in ops and ops[member].get((launch.group, launch.number)) != launch.op]
            for rank, launch in sorted(last.items())}


def _with_left_out(launches: Sequence[Launch], axes: Sequence[str]) -> list[Launch | str]:
    """The launches of a rank that has ended, and in their places the axes over which it should have all-reduced."""
    rest, whole = list(launches), list[Launch | str]()
    for axis in axes:
        whole.append(rest.pop(0) if rest and rest[0].axis == axis else axis)
    return whole + rest


def _label(launch: Launch, several: bool, lined: bool, between: str = "\n") -> str:
    """`all_reduce`, with several groups `over tp {0, 1}`, and the line of the program where lines differ."""
    over = f"over {launch.axis or launch.group} {{{', '.join(map(str, launch.ranks))}}}" if several else ""
    over = over and (" " if between == ", " else between) + over
    return f"{launch.op}{over}" + (f"{between}line {launch.stack[0][1]}" if lined and launch.stack else "")


def _box(axes: Axes, column: int, row: int, label: str, look: dict[str, Any]) -> None:
    axes.add_patch(Rectangle((column, row), WIDE, HIGH, clip_on=False, **look))  # whole at the left edge
    axes.text(column + WIDE / 2, row + HIGH / 2, label, ha="center", va="center", fontsize=11, color=INK)


def _arrows(axes: Axes, edges: Mapping[int, Sequence[int]], ranks: Sequence[int], x: float) -> None:
    """A dot for each rank, and an arrow to each that it waits for: on the left downwards, on the right upwards."""
    height = {rank: row + HIGH / 2 for row, rank in enumerate(ranks)}
    axes.plot([x] * len(ranks), [*height.values()], "o", color=INK, markersize=5, clip_on=False)
    for rank, others in edges.items():
        for other in others:
            axes.add_patch(FancyArrowPatch(
                (x, height[rank]), (x, height[other]), connectionstyle="arc3,rad=0.35", arrowstyle="-|>", color=RED,
                mutation_scale=12, linewidth=1.4, shrinkA=3, shrinkB=3, clip_on=False))


def _end(error: RankError, rank: int, others: Sequence[int]) -> str:
    failure = next((failure for failure in error.failures if failure.rank == rank), None)
    if failure is None:
        return "returned"
    if failure.kind == "waiting":
        return f"waits for {ranks_text(others)}" if others else "waits"
    return shortened(failure.summary, 40, head=37)
