"""What "One graph for the whole step" counts and says, and its graders with answers that are wrong in one way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench import author_module, capture, partition, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.lab.traces import read_order
from workbench.lab.whole_step.join import Update, join
from workbench.world.mesh import World
from workbench_lessons.course.grading import grade
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l14_read_your_own_trace.traces import recorded as recorded_trace
from workbench_lessons.l15_one_graph_for_the_whole_step import solution as solved
from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import (
    even_size,
    finds,
    lines_of,
    tail_of,
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


def test_a_graph_s_lines_between_two_nodes():
    graph = joined().graph
    assert lines_of(graph, after="mul_2", upto="clamp") == "clamp: float32 [] = aten.clamp(mul_2, None, 1.0)"
    assert lines_of(graph).startswith("primals_1: ") and lines_of(graph).endswith("return (sum_1, _to_copy_1)")
    assert max(map(len, lines_of(graph).splitlines())) <= 100 and "not recorded" not in lines_of(graph)


@pytest.mark.parametrize(("passes", "clip", "wanted"), [
    ((), 1.0, {"norm": (48, 0), "scaling": (48, 48), "update": (192, 144)}),
    (("fused_clip_adamw",), 1.0, {"norm": (48, 0), "scaling": (0, 0), "update": (192, 192)}),
    ((), None, {"norm": (48, 0), "scaling": (0, 0), "update": (192, 144)}),
])
def test_traffic_of_one_weight(passes, clip, wanted):
    found = joined(*passes, clip=clip)
    assert traffic(found) == wanted


def test_two_passes_that_are_right_alone_are_wrong_together():
    # here, since importing it registers both passes
    from workbench_lessons.l15_one_graph_for_the_whole_step.two_passes import lane, three_layers

    for passes, lint in ((("early_updates",), ["PASS"]), (("sink",), ["PASS"]),
                         (("early_updates", "sink"), ["PASS", "FAIL"])):
        step, records = three_layers(*passes)
        assert [record.verdict("lint").outcome.name for record in records] == lint, passes
        early = "U" in lane(step.joined.graph).rpartition("R")[0]
        assert early == ("early_updates" in passes)


def rooted(rows):
    """The right answer."""
    memory, updated, found = {}, set(), {}
    for name, kind, reads in rows:
        memory[name] = memory[reads[0]] if kind == "view" else name
        found |= {memory[r]: name for r in reads if kind != "view" and memory[r] in updated and memory[r] not in found}
        updated |= {memory[reads[0]]} if kind == "update" else set()
    return found


def by_name(rows):
    """Wrong: knows no views."""
    return rooted([(name, "compute" if kind == "view" else kind, reads) for name, kind, reads in rows])


def views_read(rows):
    """Wrong: takes a view for a read."""
    memory, updated, found = {}, set(), {}
    for name, kind, reads in rows:
        memory[name] = memory[reads[0]] if kind == "view" else name
        found |= {memory[r]: name for r in reads if memory[r] in updated and memory[r] not in found}
        updated |= {memory[reads[0]]} if kind == "update" else set()
    return found


@pytest.mark.parametrize(("case", "finder"), [
    ("a read after the update", lambda rows: {}), ("the program of the task", by_name),
    ("a view that nobody reads", views_read)])
def test_a_wrong_finder_is_told_by_its_case_and_meets_its_hint(case, finder):
    score, message = finds(finder)
    assert score < 1 and message.startswith("wrong with ") and f"{case}: got " in message
    assert [words for words in load_lesson(LESSON).checkpoint("late").reacts if words in message] == [case]


def test_a_finder_that_raises_and_what_is_no_function_are_refused_in_words():
    assert finds(rooted) == (1.0, "right")
    assert finds(lambda rows: rows[99])[1] == "wrong with a read after the update: IndexError: list index out of range"
    assert finds({}) == (0.0, "give a function of a list of rows")


def test_the_solutions_are_right_and_a_wrong_number_is_told_by_its_side():
    found = joined()
    inputs = len(found.graph.graph.find_nodes(op="placeholder"))
    assert finds(solved.late()) == (1.0, "right") and solved.all_inputs(found.pair.forward, found) == inputs
    before, after = (sum(map(sum, traffic(each).values())) for each in (found, joined("fused_clip_adamw")))
    weight = found.pair.authored.module.weight
    assert solved.saved_bytes(found.pair.authored) == before - after == weight.nbytes
    lesson, graphs = load_lesson(LESSON), {"without": found, "fused": joined("fused_clip_adamw")}
    for name, given, answer, said in (
            ("all_inputs", {"of": found}, inputs, "right"), ("all_inputs", {"of": found}, inputs + 1, "too high"),
            ("all_inputs", {"of": found}, inputs - 1, "too low: one state for each parameter"),
            ("saved_bytes", graphs, before - after, "right"), ("saved_bytes", graphs, weight.nbytes - 1, "too low"),
            ("saved_bytes", graphs, 2 * weight.nbytes, "too high: a write of each gradient is left"),
            ("saved_bytes", graphs, weight.numel(), "too low: elements, not bytes")):
        assert grade(lesson.checkpoint(name).check, answer, given)[1] == said


def test_the_size_where_launches_take_as_long_as_the_work_and_answers_on_either_side():
    tail = tail_of(read_order([recorded_trace("llama3_full_inductor_cudagraph")]).traced[-1])
    truth = even_size(1000, tail)
    assert round(even_size(374_360_064, tail) / 1e6) == 150  # what the lesson's solution says
    assert solved.tips(1000, tail) == truth and truth * tail.gpu_ms == pytest.approx(1000 * tail.cpu_ms)
    check = load_lesson(LESSON).checkpoint("tips").check
    inverse, share = 1000 * tail.gpu_ms / tail.cpu_ms, round(tail.cpu_ms / tail.gpu_ms, 2)
    for answer, said in ((truth, "right"), (2000, "too high"),
                         (inverse, "too high: the ratio of the two times is the other way round"),
                         (share, "a share of the traced model, not a number of elements"),
                         (truth * tail.gpu_ms / (tail.gpu_ms + tail.clip_ms), "too low")):
        assert grade(check, answer, {"size": 1000, "tail": tail})[1] == said
