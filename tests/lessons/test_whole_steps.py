"""What "One graph for the whole step" counts and says, and its graders with answers that are wrong in one way."""

import pytest
import torch
from torch import nn

from workbench import ParallelPlan, World, author_module, capture, partition, run_partitioned
from workbench.lab.whole_step.join import Update, join
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l15_one_graph_for_the_whole_step import solution as solved
from workbench_lessons.l15_one_graph_for_the_whole_step.pictures import Memory
from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import (
    finds,
    lowered_peak,
    traffic,
)

LESSON = "15_one_graph_for_the_whole_step"


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x, y):
        return ((x @ self.weight.t() - y) ** 2).sum()


def joined(*passes, clip: float | None = 1.0):
    batch = torch.ones(2, 4), torch.ones(2, 3)
    alone = World("gloo", 1, 0, torch.device("cpu"))
    found = join(partition(capture(author_module(Linear(), alone, None, ParallelPlan(), batch=lambda: batch))),
                 Update(clip=clip))
    run_partitioned(found, passes)
    return found


@pytest.mark.parametrize(("passes", "clip", "wanted"), [
    (("fused_clip_adamw",), 1.0, {"norm": (48, 0), "scaling": (0, 0), "update": (192, 192)}),
    ((), None, {"norm": (48, 0), "scaling": (0, 0), "update": (192, 144)}),
])
def test_traffic_of_one_weight(passes, clip, wanted):
    found = joined(*passes, clip=clip)
    assert traffic(found) == wanted


def test_two_passes_that_are_right_alone_are_wrong_together_until_one_is_repaired():
    # here, since importing it registers both passes
    from workbench_lessons.l15_one_graph_for_the_whole_step.two_passes import (
        eager_loop,
        first_wrong,
        in_order,
        joined,
        one_graph,
        repairs,
        same_weights,
        sink,
    )

    def still(gm, example_inputs, *, options):
        return gm

    def raises(gm, example_inputs, *, options):
        raise KeyError("no such node")

    assert repairs(solved.repair()) == (1.0, "right")
    assert repairs(still) == (0.0, "without early updates, its order is not sink's")
    assert repairs(3) == (0.0, "give a function such as sink") and "no such node" in repairs(raises)[1]
    score, message = repairs(sink)
    assert score == 0 and message.startswith("a read comes too late: 2.weight is read by mm_4 after ")
    reacts = load_lesson(LESSON).checkpoint("repair").reacts
    for said in (message, repairs(still)[1]):
        assert len([words for words in reacts if words in said]) == 1

    for layers in (2, 3, 4):
        loop = eager_loop(layers)
        runs = {passes: one_graph(layers, *passes.split()) for passes in (
            "", "early_updates", "sink", "sink early_updates", "early_updates sink")}
        assert [row[1] for row in same_weights(runs, loop).rows] == [*["PASS"] * 4, "FAIL"]
        assert first_wrong(loop, runs["early_updates sink"])[0] == 2
    both, records = joined(3, "early_updates", "sink")
    assert [name for name in in_order(both) if name.endswith("!")] == ["R2!", "R1!"]
    said = records[-1].verdict("lint").message
    assert "2.weight is read by" in said and "1.weight is read by" in said and "0.weight" not in said
    assert "R2 U2" in " ".join(in_order(joined(3, "early_updates")[0]))
    assert in_order(joined(3, "early_updates", clip=1.0)[0])[-4:-3] == ("G0",)  # no update before the last gradient


def by_name(rows):
    """Wrong: knows no views."""
    return solved.late()([(name, "compute" if kind == "view" else kind, reads) for name, kind, reads in rows])


def views_read(rows):
    """Wrong: takes a view for a read, too."""
    both = {"view": ("compute", "view")}
    return solved.late()([(name, as_, reads) for name, kind, reads in rows for as_ in both.get(kind, (kind,))])


@pytest.mark.parametrize(("case", "finder"), [
    ("a read after the update", lambda rows: {}), ("the program of the task", by_name),
    ("a view that nobody reads", views_read)])
def test_a_wrong_finder_is_told_by_its_case_and_meets_its_hint(case, finder):
    score, message = finds(finder)
    assert score < 1 and message.startswith("wrong with ") and f"{case}: got " in message
    assert [words for words in load_lesson(LESSON).checkpoint("late").reacts if words in message] == [case]


def test_the_solutions_are_right_and_a_wrong_answer_is_told_how():
    assert finds(solved.late()) == (1.0, "right")
    assert finds(lambda rows: rows[99])[1] == "wrong with a read after the update: IndexError: list index out of range"
    assert finds({}) == (0.0, "give a function of a list of rows")


def test_the_lower_peak_is_named():
    flat, low = Memory(0, [3, 5], [0.0, 1.0]), Memory(0, [3, 4], [0.0, 1.0])
    lower, same = {"one AdamW": flat, "early_updates": low}, {"one AdamW": flat, "early_updates": flat}
    assert lowered_peak({128: lower, 2048: same}) == 128
    assert lowered_peak({128: lower, 2048: lower}) == "both" and lowered_peak({128: same}) == "neither"
