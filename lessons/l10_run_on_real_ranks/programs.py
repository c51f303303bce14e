"""Programs that hang, run on ranks, and what a checkpoint counts of them. Imported on the ranks: it imports little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist

from workbench.torch_api.distributed import flight_recorder
from workbench.world.diagnosis import RankError
from workbench.world.pool import RankPool

BATCHES = [[[1.0, 2.0, 3.0], [3.0, 4.0, 5.0], [5.0, 6.0, 7.0], [7.0, 8.0]],
           [[2.0], [4.0, 1.0, 1.0, 6.0], [6.0, 3.0], [8.0]]]
"""Two data sets: the batches of each rank."""
MEANS = [[4.0, 5.0, 5.0], [5.0, 2.0, 1.0, 6.0]]
FORGOTTEN = {0: ["tp", "dp"], 1: ["tp", "dp"], 2: ["dp"], 3: ["tp", "dp"]}
"""For each rank the axes over which it all-reduces; one rank lacks one."""
CIRCLE = {0: ["dp", "tp", "tp"], 1: ["tp", "dp", "tp"], 2: ["tp", "tp", "dp"], 3: ["dp", "tp", "tp"]}
Counts = dict[str, Any]


def stuck(pool: RankPool, program: Callable[[], Any]) -> RankError | None:
    """The error of a program that hangs or fails, or None. The pool's ranks are new ones afterwards."""
    try:
        pool.run(program)
        pool.restart()
    except RankError as error:
        return error
    return None


def told(error: RankError) -> str:
    """What an error says before the stacks: who waits where, and where the ranks part."""
    return "\n\n".join(str(error).split("\n\n")[:2])


def _failing(error: RankError) -> Counts:
    waiting = sum(failure.kind == "waiting" for failure in error.failures)
    return {"ranks that wait": waiting, "ranks that raise": len(error.failures) - waiting}


def _two_steps(step: Callable[..., Any]) -> tuple[bool, bool]:
    rank = dist.get_rank()
    with redirect_stdout(StringIO()) as printed:
        means = [step(torch.tensor(float(rank * k)), rank, 4) for k in (1, 2)]
    return means == [1.5, 3.0], bool(printed.getvalue())


def steps_of(pool: RankPool, step: Callable[..., Any]) -> tuple[Counts, RankError | None]:
    """What is wrong with a step that should return the mean on every rank and print it on rank 0, and its error."""
    counts = dict.fromkeys(("ranks that wait", "ranks that raise", "ranks without the means",
                            "ranks that print wrongly"), 0)
    try:
        results = pool.run(_two_steps, step)
    except RankError as error:
        return counts | _failing(error), error
    pool.restart()
    for rank, (right, printed) in enumerate(results):
        counts["ranks without the means"] += not right
        counts["ranks that print wrongly"] += printed != (rank == 0)
    return counts, None


def circle_of(error: RankError | None, order: dict[int, list[str]]) -> Counts:
    """Who still waits in these orders, and what was changed in `CIRCLE` beyond one swap of two neighbours."""
    waits, swaps, others = [], 0, 0
    for rank, launches in sorted(error.launches.items() if error else ()):
        if launches and not launches[-1].done:
            waits.append(f"rank {rank} in {launches[-1].axis} number {launches[-1].number}")
    for rank, before in CIRCLE.items():
        now = list(order.get(rank, ()))
        swaps += abs([*now, "dp"].index("dp") - before.index("dp"))
        others += sorted(now) != sorted(before)
    return {"who waits": ", ".join(waits) or "nobody", "swaps too many": max(0, swaps - 1),
            "ranks with other all-reduces": others}


def _averaged(average: Callable[..., Any]) -> list[tuple[Any, int]]:
    results = []
    for batches in BATCHES:
        before = len(flight_recorder.launches(stacks=False))
        means = average(batches[dist.get_rank()], dist.all_reduce)
        results.append((means, len(flight_recorder.launches(stacks=False)) - before))
    return results


def _fault(means: Any, right: Sequence[float]) -> str:
    try:
        values = torch.tensor([float(mean) for mean in means])
    except (TypeError, ValueError, RuntimeError):
        return "results that are no list"
    if len(values) != len(right):
        return "lists of another length"
    return "" if torch.allclose(values, torch.tensor(right)) else "lists with other means"


def averages_of(pool: RankPool, average: Callable[..., Any]) -> tuple[Counts, RankError | None]:
    """What is wrong with a loop that should return `MEANS` on every rank, and its error. Prints a wrong list."""
    counts = dict.fromkeys(("ranks that wait", "ranks that raise", "results that are no list",
                            "lists of another length", "lists with other means", "all-reduces too many"), 0)
    try:
        ranks = pool.run(_averaged, average)
    except RankError as error:
        return counts | _failing(error), error
    wrong = []
    for rank, results in enumerate(ranks):
        for number, ((means, calls), right) in enumerate(zip(results, MEANS, strict=True), 1):
            if problem := _fault(means, right):
                counts[problem] += 1
                wrong.append(f"rank {rank}, data set {number}: {means}, wanted {right}")
            counts["all-reduces too many"] = max(counts["all-reduces too many"], calls - len(right) - 1)
    if wrong:
        print(wrong[0])
    return counts, None
