"""What "One graph for the whole step" counts and says, and its graders with answers that are wrong in one way."""

import pytest
import torch
from torch import nn

from workbench import ParallelPlan, World, author_module, capture, partition, run_partitioned
from workbench.lab.whole_step.join import Update, join
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.grading import grade
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.course.recorded_figures import json_lines
from workbench_lessons.l15_one_graph_for_the_whole_step import solution as solved
from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import (
    VARIANTS,
    finds,
    lines_of,
    steps_on_gpus,
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


def test_two_passes_that_are_right_alone_are_wrong_together_until_one_is_repaired():
    # here, since importing it registers both passes
    from workbench_lessons.l15_one_graph_for_the_whole_step.two_passes import lane, repairs, sink, three_layers

    for passes, lint in ((("early_updates",), ["PASS"]), (("sink",), ["PASS"]),
                         (("early_updates", "sink"), ["PASS", "FAIL"])):
        step, records = three_layers(*passes)
        assert [record.verdict("lint").outcome.name for record in records] == lint, passes
        early = "U" in lane(step.joined.graph).rpartition("R")[0]
        assert early == ("early_updates" in passes)

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
    found = joined()
    assert finds(solved.late()) == (1.0, "right")
    assert finds(lambda rows: rows[99])[1] == "wrong with a read after the update: IndexError: list index out of range"
    assert finds({}) == (0.0, "give a function of a list of rows")
    before, after = (sum(map(sum, traffic(each).values())) for each in (found, joined("fused_clip_adamw")))
    weight = found.pair.authored.module.weight
    assert solved.saved_bytes(found.pair.authored) == before - after == weight.nbytes
    lesson, graphs = load_lesson(LESSON), {"without": found, "fused": joined("fused_clip_adamw")}
    for name, given, answer, said in (
            ("saved_bytes", graphs, before - after, "right"), ("saved_bytes", graphs, weight.nbytes - 1, "too low"),
            ("saved_bytes", graphs, 2 * weight.nbytes, "too high: a write of each gradient is left"),
            ("saved_bytes", graphs, weight.numel(), "too low: elements, not bytes")):
        assert grade(lesson.checkpoint(name).check, answer, given)[1] == said


def test_what_the_lesson_says_of_steps_with_like_settings():
    rows = steps_on_gpus().rows
    steps = {(model, where): [float(ms) for ms in ms_of.split(", ")] for model, where, ms_of, *_ in rows}
    of_8b = [steps["8b", where] for where in ("outside: FSDP2, torch.compile", "in the graph, recorded")]
    assert of_8b == [[435.5, 438.1], [437.6, 440.3]]
    for model in ("1b", "8b"):
        means = [sum(ms) / len(ms) for (flavor, _), ms in steps.items() if flavor == model]
        assert max(means) < 1.02 * min(means)
    peaks = {row[:2]: tuple(map(float, row[4:])) for row in rows}
    fsdp2, outside, inside = (peaks["1b", where] for where in VARIANTS.values())
    assert [round(outside[i] - inside[i], 1) for i in (0, 1)] == [1.1, 3.1] and round(inside[0] - fsdp2[0], 1) == 1.4
    assert round(fsdp2[1] - inside[1], 1) == 2.4
    of_8b = [peaks["8b", where] for where in ("in the graph, recorded", "outside: FSDP2, torch.compile")]
    assert [round(joined_ - fsdp2_, 1) for joined_, fsdp2_ in zip(*of_8b, strict=True)] == [5.4, 4.8]
    defaults = [run for run in json_lines(results_dir() / "like_8b_h200x2.jsonl") if run["variant"] == "compile"]
    assert [round(run["step_ms"]) for run in defaults] == [464, 467]
    assert {round(run["peak_gib"], 1) for run in defaults} == {67.9} and round(of_8b[0][0] - 67.9) == 17
