"""Graders of one lesson each: a board's result or the same data typed by hand, and what is wrong in one way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench import author_module, capture, fake_world
from workbench.notebook.lessons.grading import grade
from workbench_lessons.l01_author_with_dtensor.placement_lab import PlacementLab
from workbench_lessons.l03_split_forward_and_backward.partitioner import Partitioner
from workbench_lessons.l05_bucket_and_overlap.collective_order import CollectiveOrder
from workbench_lessons.l07_compile_everything.kernel_calls import calls_of
from workbench_lessons.l08_replay_with_cudagraphs.whole_sum import whole_sum

pytestmark = pytest.mark.integration
PLACED = "workbench_lessons.l01_author_with_dtensor.placement_lab:placed"
CUT = "workbench_lessons.l03_split_forward_and_backward.partitioner:cut"
HANGS = "workbench_lessons.l10_run_on_real_ranks.program_counters:hangs"
ORDERED = "workbench_lessons.l05_bucket_and_overlap.collective_order:ordered"
MESH = {"dp": 2, "tp": 2}
CIRCLE, OTHER = ["0: dp", "1: tp", "2: tp", "3: dp"], ["0: tp", "1: dp", "2: dp", "3: tp"]
TENSOR = 8 * 64 * 4


@pytest.fixture(scope="module")
def lab():
    return PlacementLab(x=(256, 128), w=(128, 512), mesh={"dp_shard": 2, "tp": 2})


def test_placements_that_fit_at_the_least_bytes(lab):
    def placed(answer):
        return grade(PLACED, answer, {"lab": lab})[:2]

    names = ("x_0", "x_1", "w_0", "w_1")
    at = {place: each["bytes"] for place, each in lab.table.items() if not each["added"]}
    best = dict(zip(names, min(at, key=at.get), strict=True))
    dear = dict(zip(names, max(at, key=at.get), strict=True))
    assert placed(best) == (1.0, "every target met")
    assert placed(dear)[0] < 1 and "cost in bytes" in placed(dear)[1]
    assert placed(lab)[0] == 0 and placed(lab)[1].startswith("the placements do not fit: DTensor adds ")
    assert placed({**best, "x_0": "diagonal"}) == (0.0, "x_0: 'diagonal' is none of replicate, rows, columns")
    assert placed(3) == (0.0, "give the board, or a placement for each of x_0, x_1, w_0, w_1")
    for name, value in best.items():
        setattr(lab, name, value)
    assert placed(lab) == (1.0, "every target met")


def test_what_is_saved_is_taken_from_the_board_or_typed():
    layers = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 64, bias=False), nn.SiLU(),
                           nn.Linear(64, 16, bias=False))
    with fake_world(1) as world:
        deep = capture(author_module(layers, world, None, batch=lambda: (torch.empty(8, 32),)))
    board = Partitioner(deep, {name: name for name in ("mm", "silu", "mm_1", "silu_1")})
    given = {"board": board, "start": {"bytes saved": 4 * TENSOR, "FLOP again": 0},
             "at_most": {"bytes saved": 2 * TENSOR, "FLOP again": 0}}

    def cut(answer):
        return grade(CUT, answer, given)[:2]

    assert cut(board)[0] == 0 and cut(board) == cut(["mm", "silu", "mm_1", "silu_1"])
    assert cut(["mm", "mm_1"]) == cut({"mm": True, "silu": False, "mm_1": True, "silu_1": False}) == (
        1.0, "every target met")
    assert "FLOP again" in cut(["mm"])[1]
    assert cut(["mm", "mul"]) == (0.0, "'mul' is none of the tensors of this board: mm, silu, mm_1, silu_1")
    assert cut({"mm": True})[1].startswith("say of 'silu' whether it is saved")
    assert cut(3) == (0.0, "give the board, or the names of the saved tensors")
    board.saved = ["mm", "mm_1"]
    assert cut(board) == (1.0, "every target met")


def test_the_other_circle_and_no_other_launches():
    def hangs(answer):
        return grade(HANGS, answer, {"mesh": MESH, "shown": CIRCLE})[:2]

    assert hangs(OTHER) == hangs(OTHER[::-1]) == (1.0, "right")
    assert hangs(CIRCLE) == hangs(CIRCLE[::-1]) == (0.0, "this circle is the one that is shown")
    assert hangs(["0: dp", "2: dp"]) == (0.0, "no rank hangs: nobody waits")
    assert hangs(["0: dp"]) == (0.0, "no rank hangs: rank 0 waits, and ranks 1, 2, 3 can go on")
    assert hangs(["4: dp"])[1].startswith("'4: dp' is no launch")
    assert hangs({"0": "dp"}) == (0.0, "give the board, or a list of launches such as '0: dp'")


@pytest.fixture
def board(pair):
    return CollectiveOrder(pair.backward, "h200x2")


def ordered(answer, board, limits=None):
    captured = board.measure(board.given)
    limits = limits or {"exposed ms": captured["exposed ms"] * 3 / 4, "peak bytes": captured["peak bytes"]}
    return grade(ORDERED, answer, {"board": board, "at_most": limits})


def test_an_order_is_taken_from_the_board_or_typed(board):
    assert ordered(board, board)[:2] == ordered(board.given, board)[:2]
    score, message, _ = ordered(board, board)
    assert score == 0 and "exposed ms" in message
    board.order = board.rival
    rival = board.measure(board.rival)
    loose = {"exposed ms": rival["exposed ms"], "peak bytes": rival["peak bytes"]}
    assert ordered(board, board, loose)[:2] == ordered(board.rival, board, loose)[:2] == (1.0, "every target met")
    assert ordered(board.given[:-1], board)[:2] == (
        0.0, f"the order is no permutation of the graph's nodes (backward, {len(board.given)} nodes): "
             "1 nodes are missing, output first")
    assert ordered(3, board)[1] == "give the board, or the names of all its nodes in their order"


def test_a_sum_that_lacks_little_is_told():
    assert [whole_sum(answer, truth=1000) for answer in (1000, "1,000", 996, 990, 1001)] == [
        (1, "right"), (1, "right"), (0, "almost: less than 1% is missing"), (0, "too low"), (0, "too high")]


@pytest.mark.parametrize(("answer", "score", "message"), [
    ([0, 2], 1.0, "right"), ([0, 1, 2], 2 / 3, "1 of your 3 calls are not of it"),
    ([0], 0.5, "1 missing, among them every cpp call"), ([1], 0.0, "1 of your 1 calls are not of it; 2 missing"),
    ([7], 0.0, "give calls of the backward graph, or their numbers"),
    (None, 0.0, "give calls of the backward graph, or their numbers"),
])
def test_calls_of_nodes_are_asked_for_and_no_other(answer, score, message):
    kinds = [(("a",), "extern"), (("b",), "cpp"), (("c", "a"), "cpp")]
    calls = [SimpleNamespace(number=i, nodes=nodes, kind=kind) for i, (nodes, kind) in enumerate(kinds)]
    graph = SimpleNamespace(graph="backward", kernels=calls)
    assert calls_of(answer, graph=graph, nodes={"a"}) == (score, message)
    if answer == [0, 2]:
        assert calls_of(calls[::2], graph=graph, nodes={"a"}) == (1.0, "right")
