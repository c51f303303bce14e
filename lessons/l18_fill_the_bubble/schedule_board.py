"""Drag the computations of microbatches in the lanes of a pipeline's ranks: the bubble follows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets

from workbench.lab.pipeline.cut import PipelineCut
from workbench.lab.pipeline.estimate import BARS, estimate
from workbench.lab.pipeline.plan import Action, Plan, plan
from workbench.notebook.draw.colors import INK
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench_lessons.course.grading import Graded, targets
from workbench_lessons.course.moment import Moment
from workbench_lessons.l18_fill_the_bubble.pictures import lanes

KINDS = {kind: (*BARS[kind], units) for kind, units in {"F": 1, "B": 2, "I": 1, "W": 1}.items()}
"""What the letters of an order mean, their colours, and their time units."""
OTHERS = (2, 6), (6, 12)
"""Ranks and microbatches with which a rule is tried once it is right on the lesson's."""
Order = Sequence[str]
"""For each rank its computations, such as "F0 F1 I0 W0 I1 W1". Rank r has stage r."""


def order_of(schedule: Plan) -> list[str]:
    """The computations of a plan that has one stage on each rank."""
    return [" ".join(f"{a.kind}{a.microbatch}" for a in row if len(a.kind) == 1) for row in schedule.ranks]


def halved(order: Order) -> list[str]:
    """Each whole backward in its two halves, one behind the other."""
    return [re.sub(r"B(\d+)", r"I\1 W\1", row) for row in order]


def at_need(action: Action, last: int) -> list[Action]:
    """A computation between the receive that it needs and the send of its result; the last stage is `last`."""
    kind, stage, _ = action
    way, here = ("F", stage > 0) if kind == "F" else ("B", stage < last)
    there = stage < last if kind == "F" else stage > 0
    before = [Action(f"RECV_{way}", *action[1:])] if here and kind != "W" else []
    behind = [Action(f"SEND_{way}", *action[1:])] if there and kind != "W" else []
    return [*before, action, *behind]


def _actions(order: Order) -> list[list[Action]]:
    return [[Action(name[0], rank, int(name[1:])) for name in row.split()] for rank, row in enumerate(order)]


def _plan(rows: list[list[Action]]) -> Plan:
    return Plan(rows, len(rows), 1 + max(action.microbatch for row in rows for action in row))


def received_at_need(order: Order) -> Plan:
    """The order with each receive right in front of the computation that needs it, and each send right behind it."""
    last = len(order) - 1
    return _plan([[part for action in row for part in at_need(action, last)] for row in _actions(order)])


def plan_of(order: Order) -> Plan:
    """The order with each receive where its sender has got to, as torch puts them.

    Where ranks wait for each other, each of them receives at need from there on: `check` of the plan names them.
    """
    todo, last = _actions(order), len(order) - 1
    rows: list[list[Action]] = [[] for _ in order]
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(todo):
            parts = at_need(actions[0], last) if actions else []
            if parts and parts[0] in (*rows[rank], actions[0]):
                rows[rank] += parts[parts.index(actions.pop(0)):]
                moving = True
                if len(rows[rank][-1].kind) > 1:
                    receive = rows[rank][-1].other
                    rows[receive.stage].append(receive)
    for rank, actions in enumerate(todo):
        parts = [part for action in actions for part in at_need(action, last)]
        rows[rank] += [part for part in parts if part not in rows[rank]]
    return _plan(rows)


def enough(ranks: int, bubble: float) -> int:
    """The fewest microbatches with which whole backwards leave no larger share of the step idle than this."""
    idle = ranks - 1
    return next(count for count in itertools.count(1) if idle <= bubble * (count + idle) + 1e-9)


def alive(row: str) -> int:
    """The most microbatches whose forward has run on this rank, and whose backward has not ended."""
    now = most = 0
    for name in row.split():
        now += {"F": 1, "I": 0}.get(name[0], -1)
        most = max(most, now)
    return most


class ScheduleBoard(Moment):
    """Ranks of a pipeline, one stage on each, in units of time.

    `order`: each rank's computations, as they stand now. `given`: at first, by default 1F1B with halved backwards.
    `figures`: the bubble in percent, the units of a step, and the most microbatches alive on a rank.
    """

    order = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, ranks: int = 4, microbatches: int = 4, order: Order = ()):
        whole, gpipe = (order_of(plan(name, ranks, ranks, microbatches)) for name in ("1F1B", "GPipe"))
        self.ranks, self.microbatches, self.whole = ranks, microbatches, whole
        self.given = list(order) or halved(whole)
        super().__init__("schedule", f"{microbatches} microbatches on {ranks} ranks", {
            "kinds": KINDS, "given": self.given, "rival": whole}, order=self.given)
        self._moved(None)
        self.add(self.setting("as given", order=self.given), self.setting("1F1B, whole backwards", order=whole),
                 self.setting("GPipe", order=gpipe))

    @property
    def plan(self) -> Plan:
        """What the ranks do in this order, with sends and receives."""
        return plan_of(self.order)

    @property
    def schedule(self) -> list[str]:
        """The order in torch's notation, for PipelineStep: "0F0 0F1 0I0 0W0"."""
        return [re.sub(r"(\w+)", rf"{rank}\1", row) for rank, row in enumerate(self.order)]

    def measure(self, order: Order) -> dict[str, float]:
        """The figures of an order that has no problem."""
        spans, _ = plan_of(order).spans(lambda action: KINDS[action.kind][2])
        step = max(end for *_, end in spans)
        busy = sum(end - begin for *_, begin, end in spans)
        return {"bubble %": round(100 - 100 * busy / step / self.ranks, 1), "units": round(step),
                "microbatches alive": max(map(alive, order))}

    def problem(self, order: Order) -> str:
        """Why ranks cannot run this order, or ""."""
        if len(order) != self.ranks:
            return f"{len(order)} lanes for {self.ranks} ranks: give one for each"
        for rank, row in enumerate(order):
            names = row.split()
            wanted = {i: [name for name in names if name[1:] == str(i)] for i in range(self.microbatches)}
            for i, parts in wanted.items():
                if "".join(name[0] for name in parts) not in ("FB", "FIW"):
                    return (f"rank {rank} runs {' '.join(parts) or 'nothing'} of microbatch {i}: it needs F{i} B{i}, "
                            f"or F{i} I{i} W{i}, in this order")
            known = {name for parts in wanted.values() for name in parts}
            if unknown := [name for name in names if name not in known]:
                return f"rank {rank} runs {unknown[0]}, which is of no microbatch from 0 to {self.microbatches - 1}"
        waits = plan_of(order).spans()[1]
        return waits and f"this order would hang: {waits}"

    @traitlets.observe("order")
    def _moved(self, change: Any) -> None:
        self.message = self.problem(self.order)
        self.figures = {} if self.message else self.measure(self.order)

    def picture(self) -> Picture:
        """A lane for each rank in this order, grey where it waits, and a dashed line where 1F1B ends.

        Of ranks that wait for each other, as far as they get.
        """
        spans, _ = self.plan.spans(lambda action: KINDS[action.kind][2])
        total, rival = max(end for *_, end in spans), self.measure(self.whole)["units"]
        figure, (axes,) = panels(9.6, 0.9 + 0.45 * self.ranks)
        bars = lanes(axes, spans, self.ranks, total)
        axes.set_xticks(range(0, int(max(total, rival)) + 1, 2))
        axes.set(xlim=(0, max(total, rival + 0.1)), xlabel="units of time")
        line = axes.axvline(rival, color=INK, linestyle="--", linewidth=1, label="1F1B, whole backwards")
        figure.legend(handles=[*bars, line], loc="outside upper right", ncols=6, frameon=False)
        said = ", ".join(f"{name} {value:g}" for name, value in self.figures.items()) or self.message
        return finish(figure, f"A lane of computations for each rank. {said}.", f"{self.title}: {said}", colors=48)


def beats(answer: Any, *, board: ScheduleBoard, at_most: Mapping[str, float]) -> Graded:
    """An order of a board: the board itself, or a row of names for each rank. One that ranks cannot run scores 0."""
    order = answer.order if isinstance(answer, ScheduleBoard) else answer
    if not isinstance(order, list | tuple) or not all(isinstance(row, str) for row in order):
        return 0.0, "give the board, or a text for each rank, such as 'F0 F1 I0 W0 I1 W1'"
    if problem := board.problem(order):
        return 0.0, problem
    return targets(board.measure(order), at_most=at_most, start=board.measure(board.given))


def rule(answer: Any, *, cut: PipelineCut, microbatches: int) -> Graded:
    """A function from (rank, ranks, microbatches) to the rank's row, beside torch's zero bubble: on the estimated times
    of a cut's stages, and then in units of time on boards of OTHERS.
    """
    if not callable(answer):
        return 0.0, "give a function of rank, ranks and microbatches"
    ranks = len(cut.stages)
    board, order = ScheduleBoard(ranks, microbatches), rows_of(answer, ranks, microbatches)
    if problem := board.problem(order):
        return 0.0, problem
    limits = figures_of(cut, _zero_bubble(ranks, microbatches)) | {"microbatches alive": ranks}
    score, message, figures = targets(
        figures_of(cut, order), at_most=limits, start=figures_of(cut, halved(board.whole)))
    for other, count in OTHERS if score >= 1 else ():
        board, order = ScheduleBoard(other, count), rows_of(answer, other, count)
        most = {"bubble %": board.measure(_zero_bubble(other, count))["bubble %"], "microbatches alive": other}
        problem = board.problem(order)
        reached, told, _ = (0.0, problem, ()) if problem else targets(board.measure(order), at_most=most)
        if reached < 1:
            return 0.5, f"right with {ranks} ranks, but with {other} ranks and {count} microbatches: {told}", figures
    return score, message, figures


def _zero_bubble(ranks: int, microbatches: int) -> list[str]:
    """torch's, with one stage on each rank."""
    return order_of(plan("InterleavedZeroBubble", ranks, ranks, microbatches))


def rows_of(function: Callable[[int, int, int], Any], ranks: int, microbatches: int) -> list[str]:
    """What the function gives for each rank, a list of names or a text, as an order."""
    rows = (function(rank, ranks, microbatches) for rank in range(ranks))
    return [row if isinstance(row, str) else " ".join(map(str, row)) for row in rows]


def figures_of(cut: PipelineCut, order: Order) -> dict[str, float]:
    """The bubble of an order with a stage on each rank, as estimated, and the most microbatches alive."""
    bubble = estimate(cut, plan_of(order)).bubble
    return {"bubble %": round(100 * bubble, 1), "microbatches alive": max(map(alive, order))}
