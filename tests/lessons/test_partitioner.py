"""Every cut of a small graph, torch's own among them, and the budget's curve."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unpacked import unpacked

from workbench import WorkbenchError, author_module, capture, fake_world, partition
from workbench.graph.read.memory import saved_tensors
from workbench_lessons.course.grading import grade
from workbench_lessons.l03_split_forward_and_backward.partitioner import Partitioner

pytestmark = pytest.mark.integration
NAMES = {"mm": "a", "mm_1": "b", "silu": "s", "mul": "p"}
ONE = 8 * 64 * 4


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.w2 = nn.Linear(64, 16, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)).sum()


@pytest.fixture(scope="module")
def captured():
    with fake_world(1) as world:
        yield lambda model: capture(author_module(model, world, None, batch=lambda: (torch.empty(8, 32),)))


@pytest.fixture(scope="module")
def joint(captured):
    return captured(GatedMLP())


@pytest.fixture(scope="module")
def board(joint):
    return Partitioner(joint, NAMES)


@pytest.fixture
def view(board):
    board.saved = list(NAMES)
    return board


def test_all_cuts_are_what_torch_makes_of_the_tags(joint, view):
    assert len(view.cuts) == 16
    assert view.cuts[("mm", "mm_1", "silu", "mul")] == (4 * ONE, 0)
    assert view.cuts[("mm", "mm_1")] == (2 * ONE, 0)
    assert view.cuts[()] == (0, 2 * 2 * 8 * 32 * 64)  # both products again
    data = unpacked(view.data)
    assert data["marked"]["minimum cut"] == [["mm", "mm_1", "mul"], 3 * ONE, 0]
    assert data["marked"]["default"][1] == sum(
        row.held_bytes for row in saved_tensors(*partition(joint.fork(), by="default").graphs)) == 4 * ONE


def test_a_choice_is_a_trait(view):
    assert view.figures == {"bytes saved": 4 * ONE, "FLOP again": 0}
    view.saved = ["mm_1", "mm"]  # in any order
    assert view.figures == {"bytes saved": 2 * ONE, "FLOP again": 0}
    _, back = view.panel.children[0].children
    back.click()
    assert view.saved == list(NAMES)


def graded(answer, board):
    return grade("workbench_lessons.l03_split_forward_and_backward.partitioner:cut", answer, {"board": board})[:2]


def test_the_grader_takes_the_board_or_names(view):
    whole = dict.fromkeys(NAMES, False)
    for answer, score, message in (
            (view, 0, "bytes saved 8,192, as at the start"),  # the target is the answer
            (["mm", "mm_1", "mul"], 0.5, "bytes saved 6,144, wanted at most 4,096"),
            (["mm", "mm_1"], 1, "every target met"),
            (whole | {"mm": True, "mm_1": True}, 1, "every target met"),
            (["mm", "add"], 0, "'add' is none of the tensors of this board: mm, mm_1, silu, mul"),
            ({"mm": True}, 0, "say of 'mm_1' whether it is saved: give mm, mm_1, silu, mul"),
            (3, 0, "give the board, or the names of the saved tensors")):
        assert graded(answer, view) == (score, message)


def test_what_cannot_be_chosen_is_named(joint, view):
    view.saved = ["mm_3"]
    assert view.message == "'mm_3' is none of the tensors that can be saved: mm, mm_1, silu, mul" and not view.figures
    view.saved = ["mm"]
    assert view.message == "" and view.figures
    with pytest.raises(WorkbenchError, match=r"the joint graph has no node 'mm_9': print\(joint\) lists its nodes"):
        Partitioner(joint, {"mm_9": "z"})
    with pytest.raises(WorkbenchError, match="7 tensors make 128 cuts: name at most 6"):
        Partitioner(joint, {n.name: n.name for n in list(joint.graph.graph.nodes)[:7]})


class SumMLP(GatedMLP):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x) + self.w3(x))).sum()


def test_a_board_that_starts_with_nothing_saved_does_not_tell_what_is_read(captured):
    board = Partitioner(captured(SumMLP()), {name: name for name in ("mm", "mm_1", "add", "silu")}, start=())
    assert board.saved == [] and board.figures == {"bytes saved": 0, "FLOP again": 4 * 8 * 32 * 64}
    for saved, score, message in (
            ([], 0, "FLOP again 65,536, as at the start"),
            (["add", "silu"], 0, "bytes saved 4,096, as many as for all that is read"),
            (["mm"], 0, "FLOP again 32,768, wanted at most 0"),
            (["add"], 1, "every target met")):
        assert graded(saved, board) == (score, message)
