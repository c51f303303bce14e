"""Where each rank stood when a call failed: a lane for each rank, a box for each collective that it launched."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from workbench.notebook.draw.colors import GREEN, GREY, INK, ORANGE, PAPER, RED
from workbench.notebook.draw.picture import Picture, finish, panels, shortened
from workbench.tools.compatibility import results_dir
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import RankError

WIDE, HIGH = 0.92, 0.7
NEVER: dict[str, Any] = {"facecolor": PAPER, "edgecolor": RED, "linewidth": 2.2}
NOT_YET = NEVER | {"linestyle": "--", "linewidth": 1.6}
LATER: dict[str, Any] = {"facecolor": PAPER, "edgecolor": GREY, "linestyle": ":"}


def lanes(error: RankError, order: Mapping[int, Sequence[str]] | None = None, *, last: int = 6) -> Picture:
    """The last collectives of each rank, in the order in which the rank launched them.

    Green: the rank has left it. Orange: the rank waits in it. A frame: other ranks wait in it for this rank, which
    has not launched it; dashed where the rank waits itself, solid where it has ended. Frames stand after the boxes,
    wherever their launches belong. On the right: what the rank did in the end. A rank that could not tell what it
    launched has an empty lane.

    order: the axes over which each rank all-reduces. The lane of a rank that waits then goes on in this order.
    """
    ranks = sorted({*error.launches, *(failure.rank for failure in error.failures)})
    told = {rank: tuple(error.launches.get(rank, ()))[-last:] for rank in ranks}
    ends = {rank: _end(error, rank) for rank in ranks}
    missing = awaited(error.launches)
    ahead = {rank: _ahead(order[rank][len(error.launches.get(rank, ())):] if order and ends[rank] == "waits" else (),
                          missing.get(rank, ())) for rank in ranks}
    several = len({launch.group for own in told.values() for launch in own}) > 1
    drawn = [launch for own in (*told.values(), *missing.values()) for launch in own]
    lined = len({launch.stack[0][1] for launch in drawn if launch.stack}) > 1
    columns = max([1, *(len(told[rank]) + len(ahead[rank]) for rank in ranks)])
    figure, (axes,) = panels(9.6, 0.9 + (0.72 if several else 0.55) * len(ranks))
    lines = []
    for row, rank in enumerate(ranks):
        said: list[str] = []
        for launch in told[rank]:
            _box(axes, len(said), row, _label(launch, several, lined), {"facecolor": GREEN if launch.done else ORANGE})
            said.append(("" if launch.done else "waits in ") + _label(launch, several, lined, ", "))
        end = ends[rank]
        how, frame = ("did not reach", NOT_YET) if end == "waits" else ("ended without", NEVER)
        for next_one in ahead[rank]:
            if isinstance(next_one, str):
                _box(axes, len(said), row, f"all_reduce\nover {next_one}", LATER)
                said.append(f"later all_reduce over {next_one}")
            else:
                _box(axes, len(said), row, _label(next_one, several, lined), frame)
                said.append(f"{how} {_label(next_one, several, lined, ', ')}")
        axes.text(columns + 0.1, row + HIGH / 2, end, va="center", fontsize=9, color=INK)
        lines.append(f"rank {rank}: {'; '.join(said + [end] * (end != 'waits' or not said))}")
    axes.set(xlim=(0, columns + 1.5), ylim=(len(ranks), -0.1), xticks=[])
    axes.set_yticks([row + HIGH / 2 for row in range(len(ranks))], [f"rank {rank}" for rank in ranks], fontsize=9.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    later = any(isinstance(each, str) for own in ahead.values() for each in own)
    axes.legend(handles=[Patch(facecolor=GREEN, label="has left it"), Patch(facecolor=ORANGE, label="waits in it"),
                         Patch(**NOT_YET, label="not reached yet; others wait there"),
                         Patch(**NEVER, label="ended without it; others wait there"),
                         *([Patch(**LATER, label="later")] if later else [])],
                frameon=False, fontsize=8.5, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    return finish(figure, "A lane for each rank: what it launched, in order. " + "; ".join(lines) + ".",
                  "\n".join(["where each rank stands", *lines]), colors=256)


def waits(error: RankError) -> str:
    """A line for each rank that waits, as its stack alone would tell, and which ranks have returned."""
    last = {rank: own[-1] for rank, own in sorted(error.launches.items()) if own and not own[-1].done}
    lines = [f"rank {rank} waits in {_label(launch, True, False, ', ')}" for rank, launch in last.items()]
    others = ", ".join(str(rank) for rank in sorted(error.launches) if rank not in last)
    return "\n".join([*lines, f"ranks {others} have returned"])


def recorded_hang() -> str:
    """The report of a hang on four GPUs: rank 0 broadcasts where the others are in a barrier."""
    recorded = json.loads((results_dir() / "notebook_10_h200x4.json").read_text())
    hung = next(row["output"] for row in recorded["rows"] if "gave no answer" in row["output"])
    report = "\n\n".join(hung.split("\n\n")[:2])
    gpus = recorded["machine"]["gpus"]
    where = f"recorded on {len(gpus)} {gpus[0]}, torch {recorded['versions']['torch']}, {recorded['date']}"
    return re.sub(r"(, called from|, in) <module> \(cell \d+, line \d+\)", "", report) + f"\n\n{where}"


def awaited(launches: Mapping[int, Sequence[Launch]]) -> dict[int, list[Launch]]:
    """For each rank the collectives that it has not launched and in which other ranks wait."""
    reached = {rank: {(launch.group, launch.number) for launch in own} for rank, own in launches.items()}
    found: dict[int, dict[tuple[str, int], Launch]] = {}
    for own in launches.values():
        for launch in own:
            for rank in () if launch.done else launch.ranks:
                key = launch.group, launch.number
                if rank in reached and key not in reached[rank]:
                    found.setdefault(rank, {})[key] = launch
    return {rank: list(each.values()) for rank, each in found.items()}


def _ahead(axes: Sequence[str], missing: Sequence[Launch]) -> list[Launch | str]:
    """What a rank has yet to launch over these axes: where others wait for it the launch, else the axis."""
    found: list[Launch | str] = []
    for axis in axes:
        found.append(next((each for each in missing if each.axis == axis and each not in found), axis))
    return [*found, *(each for each in missing if each not in found)]


def _label(launch: Launch, several: bool, lined: bool, between: str = "\n") -> str:
    """`all_reduce`, with several groups `over tp {0, 1}`, and the line of the program where lines differ."""
    over = f"over {launch.axis or launch.group} {{{', '.join(map(str, launch.ranks))}}}" if several else ""
    over = over and (" " if between == ", " else between) + over
    return f"{launch.op}{over}" + (f"{between}line {launch.stack[0][1]}" if lined and launch.stack else "")


def _box(axes: Axes, column: int, row: int, label: str, look: dict[str, Any]) -> None:
    axes.add_patch(Rectangle((column, row), WIDE, HIGH, clip_on=False, **look))  # whole at the left edge
    axes.text(column + WIDE / 2, row + HIGH / 2, label, ha="center", va="center", fontsize=8.5, color=INK,
              bbox={"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 1.5})


def _end(error: RankError, rank: int) -> str:
    failure = next((failure for failure in error.failures if failure.rank == rank), None)
    if failure is None:
        return "returned"
    return "waits" if failure.kind == "waiting" else shortened(failure.summary, 40, head=37)
