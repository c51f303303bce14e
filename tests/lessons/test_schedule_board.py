"""The board of a pipeline's schedule: figures are the plan's in Python and in the page, walls, and ranks that hang."""

import random

import pytest
from page_code import answer_of
from unpacked import unpacked

from workbench import WorkbenchError, author, capture, fake_world, load_recipe
from workbench.lab.pipeline.cut import PipelineCut, cut_into_stages
from workbench.lab.pipeline.estimate import estimate
from workbench.lab.pipeline.plan import plan
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.grading import grade
from workbench_lessons.course.recorded_figures import json_lines
from workbench_lessons.l18_fill_the_bubble import pictures, solution
from workbench_lessons.l18_fill_the_bubble.schedule_board import (
    ScheduleBoard,
    enough,
    halved,
    order_of,
)

STUCK = ["F0 I0 W0 F1 I1 W1", "F0 F1 I0 W0 I1 W1"]
BOARD = "workbench_lessons.l18_fill_the_bubble.schedule_board"


def node(code: str, values: object) -> list[list[object]]:
    """What an expression of JavaScript gives, which finds the board's functions and `given`."""
    return answer_of("schedule.js", f"console.log(JSON.stringify({code}))", values)


def shuffled(board: ScheduleBoard, seed: int) -> list[str]:
    """The order at first after some swaps of two neighbours that are not of one microbatch."""
    draw, rows = random.Random(seed), [row.split() for row in board.given]
    for _ in range(draw.choice([3, 12, 40])):
        row = draw.choice(rows)
        at = draw.randrange(len(row) - 1)
        if row[at][1:] != row[at + 1][1:]:
            row[at:at + 2] = reversed(row[at:at + 2])
    return [" ".join(row) for row in rows]


def test_the_page_and_the_plan_agree_on_random_orders():
    board = ScheduleBoard()
    orders = [board.whole, *(shuffled(board, seed) for seed in range(60))]
    code = """given.orders.map((order) => {
        const run = simulate(given.data, order);
        return [100 * run.bubble, run.total, Math.max(...run.alive), Object.keys(run.waits).length];
    })"""
    data = unpacked(board.data)
    rows = node(code, {"data": data, "orders": orders})
    hang = [bool(board.problem(order)) for order in orders]
    assert 5 < sum(hang) < 55
    for order, hangs, (bubble, step, most, waiting) in zip(orders, hang, rows, strict=True):
        assert bool(waiting) == hangs
        if not hangs:
            figures = board.measure(order)
            assert (figures["units"], figures["microbatches alive"]) == (step, most)
            assert figures["bubble %"] == pytest.approx(bubble, abs=0.051)
    data["kinds"]["W"][2] = 2  # a seeded fault
    ((wrong, *_), _) = node(code, {"data": data, "orders": [board.given, board.given]})
    assert wrong != pytest.approx(board.measure(board.given)["bubble %"], abs=0.051)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8)])
def test_an_order_has_the_spans_that_torch_s_runtime_gives_it(ranks, count):
    for name in ("1F1B", "GPipe", "InterleavedZeroBubble"):
        board = ScheduleBoard(ranks, count, order_of(plan(name, ranks, ranks, count)))
        theirs = plan(board.schedule, ranks, ranks, count)
        board.plan.check()
        named = plan(name, ranks, ranks, count)
        assert sorted(board.plan.spans()[0]) == sorted(theirs.spans()[0]) == sorted(named.spans()[0])
        assert [sorted(row) for row in board.plan.ranks] == [sorted(row) for row in theirs.ranks]


def test_a_move_stops_at_the_wall_of_its_own_microbatch():
    order = ["F0 F1 I0 W0 I1 W1", "F0 I0 W0 F1 I1 W1"]
    code = """given.moves.map(([rank, at, to]) => {
        const { order, wall } = moved(given.order, rank, at, to);
        return [order[rank], wall];
    })"""
    moves = [[0, 2, 0], [0, 2, 5], [0, 3, 5], [1, 3, 0], [1, 3, 5], [0, 0, 0]]
    assert node(code, {"order": order, "moves": moves}) == [
        ["F0 I0 F1 W0 I1 W1", "F0"], ["F0 F1 I0 W0 I1 W1", "W0"], ["F0 F1 I0 I1 W1 W0", ""],
        ["F1 F0 I0 W0 I1 W1", ""], ["F0 I0 W0 F1 I1 W1", "I1"], ["F0 F1 I0 W0 I1 W1", ""]]


def test_ranks_that_wait_for_each_other_are_named_and_not_graded():
    board = ScheduleBoard(2, 2)
    board.order = STUCK
    assert board.message == ("this order would hang: ranks 0 and 1 wait: stage 0 receives the gradient of microbatch "
                             "0, and stage 1 receives the activation of microbatch 1")
    with pytest.raises(WorkbenchError, match="would hang"):
        board.result()
    code = "[Object.entries(simulate(given.data, given.order).waits)]"
    waits = node(code, {"data": unpacked(board.data), "order": STUCK})
    assert waits == [[["0", [1, "gradient", "0"]], ["1", [0, "activation", "1"]]]]
    assert grade(f"{BOARD}:beats", board, {"board": board, "at_most": {"bubble %": 50}})[:2] == (0.0, board.message)
    # rank 0 waits as well, for rank 1: those who wait for each other are named
    three = ScheduleBoard(3, 3)
    three.order = ["F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2", "F0 F1 B0 B1 F2 B2"]
    assert three.message.startswith("this order would hang: ranks 1 and 2 wait: stage 1 receives the gradient of ")
    board.order = board.given
    assert board.message == "" and board.result()["units"] > 0


@pytest.mark.parametrize(("order", "told"), [
    (["F0 B0 F1 B1"], "1 lanes for 2 ranks: give one for each"),
    (["F0 B0 F1 B1", "F0 B0 B1 F1"], "rank 1 runs B1 F1 of microbatch 1: it needs F1 B1, or F1 I1 W1, in this order"),
    (["F0 F1 I0 I1 W1", "F0 B0 F1 B1"], "rank 0 runs F0 I0 of microbatch 0: it needs F0 B0"),
    (["F0 B0", "F0 B0 F1 B1"], "rank 0 runs nothing of microbatch 1"),
    (["F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1"], "rank 0 runs F2, which is of no microbatch from 0 to 1"),
    (["F0 B0 F1 B1 x", "F0 B0 F1 B1"], "rank 0 runs x, which is of no microbatch"),
])
def test_an_order_that_is_none_is_told(order, told):
    assert ScheduleBoard(2, 2, order).message.startswith(told)


def test_whole_backwards_have_the_bubble_of_the_formula():
    board = ScheduleBoard()
    assert board.measure(board.whole)["bubble %"] == round(300 / 7, 1)
    assert halved(["F0 B0 F12 B12"]) == ["F0 I0 W0 F12 I12 W12"]
    wide = ScheduleBoard(8, 63)
    assert wide.measure(wide.whole)["bubble %"] == 10.0 and enough(8, 0.1) == solution.microbatches() == 63
    assert enough(4, 3 / 7) == 4 and enough(4, 0.42) == 5


@pytest.fixture(scope="module")
def cut() -> PipelineCut:
    with fake_world(1) as world:
        sizes = {"model.n_layers": 4, "mesh.dp_shard": 1, "mesh.tp": 1, "joint_passes": []}
        return cut_into_stages(capture(author(load_recipe("llama3").override(sizes), world)), 4)


def test_steps_beside_each_other_share_one_axis_of_time(cut, monkeypatch):
    monkeypatch.setattr(pictures, "finish", lambda figure, *_, **__: figure)
    steps = {name: estimate(cut, plan(name, 4, 4, 8)) for name in ("1F1B", "InterleavedZeroBubble")}
    upper, lower = pictures.over_time(steps).axes
    assert upper.get_xlim() == lower.get_xlim() and lower.get_xlim()[1] > steps["1F1B"].total_ms
    assert [line.get_xdata()[0] for line in lower.lines] == [steps["1F1B"].total_ms] and not upper.lines
    alone, = pictures.over_time({"1F1B": steps["1F1B"]}).axes
    assert alone.get_xlim() == upper.get_xlim()
    table = pictures.halves(*steps.values(), 2, {"first": 3, "second": 2, "held_bytes": 2**20})
    assert [row[1] for row in table.rows] == [5, 3, 2]


def test_what_the_lesson_says_of_recorded_bubbles_holds():
    rows = {(row["variant"], row["round"]): row for row in json_lines(results_dir() / "pipeline_16_cores.jsonl")}
    for turn in (0, 1):
        for schedule in ("1f1b", "zero_bubble"):
            ours = rows[f"workbench_{schedule}", turn]
            assert abs(ours["bubble"] / ours["estimated_bubble"] - 1) < 0.1
        for pipeline in ("workbench", "torch"):
            filled, usual = (rows[f"{pipeline}_{schedule}", turn] for schedule in ("zero_bubble", "1f1b"))
            assert 0.5 < filled["bubble"] / usual["bubble"] < 0.66
            assert 0.75 < filled["step_ms"] / usual["step_ms"] < 0.98


def test_a_rule_that_is_right_on_one_size_is_told_another(cut):
    right = solution.rule()

    def four_alone(rank, ranks, microbatches):
        return right(rank, ranks, microbatches) if ranks == 4 else ScheduleBoard(ranks, microbatches).given[rank]

    for answer, told in ((four_alone, "bubble % 10.0, wanted at most 5.3"), (
            lambda rank, *_: right(rank, 4, 8), "rank 0 runs F6, which is of no microbatch from 0 to 5")):
        score, message, _ = grade(f"{BOARD}:rule", answer, {"cut": cut, "microbatches": 8})
        assert (score, message) == (0.5, f"right with 4 ranks, but with 2 ranks and 6 microbatches: {told}")
