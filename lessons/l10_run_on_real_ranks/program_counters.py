"""Four program counters: choose which rank launches which collective next, and make the ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import Picture, Table
from workbench.world.diagnosis import RankError
from workbench_lessons.course.moment import Moment
from workbench_lessons.l10_run_on_real_ranks.pictures import lanes
from workbench_lessons.l10_run_on_real_ranks.programs import told

MOST = 4
State = tuple[tuple[str, ...], ...]
"""For each rank, the axes over which it has launched its all-reduce, in its order."""


class Rules:
    """Which launches a mesh of two axes allows, and who waits after them."""

    def __init__(self, mesh: Mapping[str, int]):
        self.axes, self.size = tuple(mesh), prod(mesh.values())
        self.groups = {axis: _groups(mesh, axis) for axis in mesh}

    def waiting(self, state: State) -> list[int]:
        """The ranks whose last all-reduce some member of its group has not launched."""
        return [rank for rank, own in enumerate(state)
                if own and any(own[-1] not in state[member] for member in self.group(rank, own[-1]))]

    def group(self, rank: int, axis: str) -> list[int]:
        """The ranks that all-reduce over this axis together with `rank`."""
        return next(group for group in self.groups[axis] if rank in group)

    def problem(self, state: State, click: str) -> str:
        """Why this launch is not possible, or ""."""
        rank, axis = _read(click)
        if rank not in range(self.size) or axis not in self.axes:
            return (f"{click!r} is no launch: write 'RANK: AXIS', with a rank from 0 to {self.size - 1} and one of "
                    f"{', '.join(self.axes)}")
        if axis in state[rank]:
            return f"rank {rank} has launched its all-reduce over {axis} already"
        if rank in self.waiting(state):
            return f"rank {rank} waits in its all-reduce over {state[rank][-1]}: it cannot launch another one"
        return ""

    def after(self, clicks: Sequence[str]) -> State:
        """The state after these launches. WorkbenchError for one that is not possible."""
        state: State = ((),) * self.size
        for click in clicks:
            if problem := self.problem(state, click):
                raise WorkbenchError(problem)
            state = _after(state, *_read(click))
        return state

    def moves(self, state: State) -> Iterator[State]:
        """The states after one launch more."""
        waits = self.waiting(state)
        for rank, own in enumerate(state):
            if rank not in waits:
                yield from (_after(state, rank, axis) for axis in self.axes if axis not in own)

    def stuck(self, state: State) -> bool:
        """Somebody waits, and no rank can launch anything."""
        return bool(self.waiting(state)) and not any(True for _ in self.moves(state))

    def reachable(self) -> list[State]:
        """All states that launches lead to."""
        found: dict[State, None] = {((),) * self.size: None}
        todo = list(found)
        while todo:
            for after in self.moves(todo.pop()):
                if after not in found:
                    found[after] = None
                    todo.append(after)
        return sorted(found)


class ProgramCounters(Moment):
    """Ranks of a mesh of two axes. Each has one all-reduce over each axis to launch, in the order of the clicks.

    record: runs the all-reduces on real ranks, each rank in its order of axes, and returns their RankError, or None.
    It is called for each state in which no rank can go on: the page shows its report. `launched`: "RANK: AXIS" for
    each click so far. `figures`: launches, ranks that wait, ranks that returned, and whether nothing can go on.
    """

    launched = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, mesh: Mapping[str, int], record: Callable[[dict[int, list[str]]], RankError | None]):
        size = prod(mesh.values())
        if len(mesh) != 2 or size > MOST:
            raise WorkbenchError(f"{size} ranks on {dict(mesh)}: the view takes a mesh of two axes and at most {MOST} "
                                 "ranks")
        self.rules = Rules(mesh)
        self.axes, self.size = self.rules.axes, size
        self.states = {state: self.rules.waiting(state) for state in self.rules.reachable()}
        self.reports: dict[State, RankError] = {}
        for state in self.states:
            if self.rules.stuck(state):
                self.reports[state] = self._recorded(state, record)
        super().__init__("counters", "which rank goes next", {
            "axes": self.axes, "size": size, "groups": self.rules.groups,
            "states": {_key(state): waits for state, waits in self.states.items()},
            "reports": {_key(state): told(error) for state, error in self.reports.items()}})
        self.figures = self._figures(((),) * size)
        self.add(self.setting("start again", launched=[]))

    @property
    def error(self) -> RankError | None:
        """What real ranks raised in the deadlock after these clicks; None where a rank can go on."""
        return self.reports.get(self.rules.after(self.launched))

    def picture(self) -> Picture | Table:
        """What a reader sees where no script runs: the deadlock after these clicks, else who shares each all-reduce."""
        if self.error:
            return lanes(self.error, self._order(self.rules.after(self.launched)))
        heads = ("rank", *(f"all_reduce over {axis}" for axis in self.axes))
        return Table("the ranks of each all-reduce", heads, tuple(
            (f"rank {rank}", *("ranks " + " and ".join(map(str, self.rules.group(rank, axis))) for axis in self.axes))
            for rank in range(self.size)))

    @traitlets.observe("launched")
    def _clicked(self, change: Any) -> None:
        try:
            self.message, self.figures = "", self._figures(self.rules.after(change.new))
        except WorkbenchError as refused:
            self.message, self.figures = str(refused), {}

    def _figures(self, state: State) -> dict[str, int]:
        waits = self.states[state]
        return {"launches": sum(map(len, state)), "ranks that wait": len(waits),
                "ranks that returned": sum(len(own) == len(self.axes) and rank not in waits
                                           for rank, own in enumerate(state)),
                "deadlock": int(state in self.reports)}

    def _order(self, state: State) -> dict[int, list[str]]:
        """The axes of each rank: those over which it has launched its all-reduce, then the others."""
        return {rank: [*own, *(axis for axis in self.axes if axis not in own)] for rank, own in enumerate(state)}

    def _recorded(self, state: State, record: Callable[[dict[int, list[str]]], RankError | None]) -> RankError:
        order = self._order(state)
        error = record(order)
        waits = {rank: launches[-1].axis for rank, launches in (error.launches if error else {}).items()
                 if launches and not launches[-1].done}
        if error is None or waits != {rank: state[rank][-1] for rank in self.states[state]}:
            found = "; ".join(f"rank {rank} over {axis}" for rank, axis in sorted(waits.items())) or "no rank"
            raise WorkbenchError(f"in the order {order}, ranks {self.states[state]} should wait in an all-reduce, and "
                                 f"in the recorded run {found} does: record has to run the all-reduces in that order, "
                                 "with time enough")
        return error


def _read(click: str) -> tuple[int, str]:
    rank, _, axis = click.partition(": ")
    return int(rank) if rank.isdecimal() else -1, axis


def _after(state: State, rank: int, axis: str) -> State:
    return (*state[:rank], (*state[rank], axis), *state[rank + 1:])


def _key(state: State) -> str:
    return "|".join(map(" ".join, state))


def _groups(mesh: Mapping[str, int], axis: str) -> list[list[int]]:
    """The ranks of each process group over an axis of the mesh, whose ranks stand in row-major order."""
    (_, rows), (last, across) = mesh.items()
    grid = [[row * across + column for column in range(across)] for row in range(rows)]
    return grid if axis == last else [list(column) for column in zip(*grid, strict=True)]
