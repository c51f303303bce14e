"""Graders that take the result of a moment: the view itself, or the same data typed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.grading import Figures, targets
from workbench.notebook.moments.collective_order import CollectiveOrder
from workbench.notebook.moments.partitioner import Partitioner
from workbench.notebook.moments.placement_lab import CHOICES, PlacementLab
from workbench.notebook.moments.program_counters import ProgramCounters, Rules

SUMS = {("columns", "rows"), ("columns", "replicate"), ("replicate", "rows")}  # of x and w, which leave a sum
Graded = tuple[float, str] | tuple[float, str, Figures]


def placed(answer: Any, *, lab: PlacementLab) -> Graded:
    """Placements of both factors (x_0, x_1, w_0, w_1) with nothing added by DTensor, and the least bytes of all."""
    names = ("x_0", "x_1", "w_0", "w_1")
    if isinstance(answer, PlacementLab):
        answer = {name: getattr(answer, name) for name in names}
    if not isinstance(answer, Mapping) or sorted(answer) != sorted(names):
        return 0.0, f"give the board, or a placement for each of {', '.join(names)}"
    if wrong := [name for name in names if not isinstance(answer[name], str) or answer[name] not in CHOICES]:
        return 0.0, f"{wrong[0]}: {answer[wrong[0]]!r} is none of {', '.join(CHOICES)}"
    now = lab.table[tuple(answer[name] for name in names)]  # type: ignore[index]
    if now["added"]:
        pairs = {(answer["x_0"], answer["w_0"]), (answer["x_1"], answer["w_1"])}
        why = "both axes leave a sum" if pairs <= SUMS else "the placements do not fit"
        return 0.0, f"{why}: DTensor adds {', '.join(now['added'])}"
    return targets({"cost in bytes": now["bytes"]}, at_most={"cost in bytes": lab.best})


def cut(answer: Any, *, board: Partitioner, at_most: Mapping[str, float], start: Mapping[str, float]) -> Graded:
    """The tensors that are saved, as a board, a list of names, or {name: saved or not}."""
    names = list(board.names)
    saved = answer.saved if isinstance(answer, Partitioner) else answer
    if isinstance(saved, Mapping):
        if missing := [name for name in names if name not in saved]:
            return 0.0, f"say of {missing[0]!r} whether it is saved: give {', '.join(names)}"
        unknown = [name for name in saved if name not in names]
        saved = [name for name in names if saved[name]]
    elif isinstance(saved, list | tuple | set):
        unknown = [name for name in saved if name not in names]
    else:
        return 0.0, "give the board, or the names of the saved tensors"
    if unknown:
        return 0.0, f"{unknown[0]!r} is none of the tensors of this board: {', '.join(names)}"
    kept = tuple(name for name in names if name in saved)
    return targets(dict(zip(("bytes saved", "FLOP again"), board.cuts[kept], strict=True)), at_most=at_most,
                   start=start)


def ordered(answer: Any, *, board: CollectiveOrder, at_most: Mapping[str, float]) -> Graded:
    """An order of a board's graph. One that is no permutation, of another graph or illegal scores 0, and says why."""
    order = answer.order if isinstance(answer, CollectiveOrder) else answer
    if not isinstance(order, list | tuple) or not all(isinstance(name, str) for name in order):
        return 0.0, "give the board, or the names of all its nodes in their order"
    if problem := board.problem(order):
        return 0.0, problem
    return targets(board.measure(order), at_most=at_most, start=board.measure(board.given))


def hangs(answer: Any, *, mesh: Mapping[str, int], shown: list[str]) -> Graded:
    """Launches ("RANK: AXIS") after which no rank can go on, with other first launches than those that are shown."""
    rules = Rules(mesh)
    clicks = answer.launched if isinstance(answer, ProgramCounters) else answer
    if not isinstance(clicks, list | tuple) or not all(isinstance(click, str) for click in clicks):
        return 0.0, "give the board, or a list of launches such as '0: dp'"
    try:
        state, known = rules.after(clicks), rules.after(shown)
    except WorkbenchError as refused:
        return 0.0, str(refused)
    if not rules.stuck(state):
        waiting = rules.waiting(state)
        free = [rank for rank, own in enumerate(state) if rank not in waiting and len(own) < len(rules.axes)]
        return 0.0, "no rank hangs: " + (f"{_ranks(waiting, 'wait')}, and {_ranks(free, 'can go on')}"
                                         if waiting else "nobody waits")
    return (0.0, "this circle is the one that is shown") if state == known else (1.0, "right")


def _ranks(some: list[int], verb: str) -> str:
    """`rank 2 waits`, `ranks 0, 2 wait`."""
    if len(some) == 1:
        return f"rank {some[0]} {verb}" + "s" * (verb == "wait")
    return f"ranks {', '.join(map(str, some))} {verb}"
