"""What "One graph for the whole step" counts and says, and its graders with answers that are wrong in one way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench import author_module, capture, partition, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.errors import WorkbenchError
from workbench.lab.traces import read_order
from workbench.lab.whole_step.join import Update, join
from workbench.notebook.lessons.grading import grade
from workbench.notebook.lessons.lesson import load_lesson
from workbench.world.mesh import World
from workbench_lessons.l14_read_your_own_trace.traces import recorded as recorded_trace
from workbench_lessons.l15_one_graph_for_the_whole_step import solution as solved
from workbench_lessons.l15_one_graph_for_the_whole_step import whole_steps
from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import (
    even_size,
    finds,
    gradients_read,
    lines_of,
    recorded,
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


@pytest.mark.parametrize(("found", "wanted"), [
    (((), 1.0), {"norm": (48, 0), "scaling": (48, 48), "update": (192, 144)}),
    ((("fused_clip_adamw",), 1.0), {"norm": (48, 0), "scaling": (0, 0), "update": (192, 192)}),
    (((), None), {"norm": (48, 0), "scaling": (0, 0), "update": (192, 144)}),
])
def test_traffic_of_one_weight(found, wanted):
    passes, clip = found
    found = joined(*passes, clip=clip)
    assert traffic(found) == wanted
    assert gradients_read(found) == {part: 48 if part == "update" else wanted[part][0] for part in wanted}


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


def one_view(rows):
    """Wrong: follows one view, and no chain."""
    memory, updated, found = {}, set(), {}
    for name, kind, reads in rows:
        memory[name] = reads[0] if kind == "view" else name
        found |= {memory[r]: name for r in reads if kind != "view" and memory[r] in updated and memory[r] not in found}
        updated |= {reads[0]} if kind == "update" else set()
    return found


def views_read(rows):
    """Wrong: takes a view for a read."""
    memory, updated, found = {}, set(), {}
    for name, kind, reads in rows:
        memory[name] = memory[reads[0]] if kind == "view" else name
        found |= {memory[r]: name for r in reads if memory[r] in updated and memory[r] not in found}
        updated |= {memory[reads[0]]} if kind == "update" else set()
    return found


def only_computes(rows):
    """Wrong: an update reads nothing."""
    return rooted([(name, kind, reads[:1] if kind == "update" else reads) for name, kind, reads in rows])


def readers(rows):
    """For each input the computes that read its memory, in order."""
    memory = {}
    for name, kind, reads in rows:
        memory[name] = memory[reads[0]] if kind == "view" else name
    return {w: [n for n, kind, reads in rows if kind == "compute" and w in map(memory.get, reads)]
            for w in memory}


def ever_updated(rows):
    """Wrong: does not ask what comes first."""
    updated = {reads[0] for _, kind, reads in rows if kind == "update"}
    return {w: names[0] for w, names in readers(rows).items() if w in updated and names}


def last_reader(rows):
    """Wrong: names the last reader."""
    return {w: (readers(rows)[w] or [""])[-1] for w in rooted(rows)}


WRONG = {
    "a read after the update": lambda rows: {}, "a read before the update": ever_updated,
    "another input": lambda rows: rooted(rows) if rows[-2][1] != "update" else {"w": "mm"},
    "two reads after the update": last_reader, "the program of the task": by_name,
    "a view that nobody reads": views_read, "programs at random": only_computes,
}


@pytest.mark.parametrize(("case", "finder"), [*WRONG.items(), ("the program of the task", one_view)])
def test_a_wrong_finder_is_told_by_its_case_and_meets_its_hint(case, finder):
    score, message = finds(finder)
    assert score < 1 and message.startswith("wrong with ") and f"{case}: got " in message
    assert [words for words in load_lesson(LESSON).checkpoint("late").reacts if words in message] == [case]


def test_a_finder_that_raises_and_what_is_no_function_are_refused_in_words():
    assert finds(rooted) == (1.0, "right")
    assert finds(lambda rows: rows[99]) == (
        0.0, "wrong with a read after the update: IndexError: list index out of range")
    assert finds({}) == (0.0, "give a function of a list of rows")


def test_the_solutions_are_right_and_a_wrong_number_is_told_by_its_side():
    found = joined()
    inputs = len(found.graph.graph.find_nodes(op="placeholder"))
    assert finds(solved.late()) == (1.0, "right") and solved.all_inputs(found.pair.forward, found) == inputs
    before, after = (sum(map(sum, traffic(each).values())) for each in (found, joined("fused_clip_adamw")))
    weight = found.pair.authored.module.weight
    built = type("Built", (), {"authored": found.pair.authored})
    assert solved.saved_bytes(built) == before - after == weight.nbytes
    lesson, graphs = load_lesson(LESSON), {"without": found, "fused": joined("fused_clip_adamw")}
    for name, given, truth, above, below in (
            ("all_inputs", {"of": found}, inputs, inputs + 1, inputs - 2),
            ("saved_bytes", graphs, before - after, 3 * weight.nbytes, weight.nbytes - 1)):
        for answer, said in ((truth, "right"), (above, "too high"), (below, "too low")):
            assert grade(lesson.checkpoint(name).check, answer, given)[1] == said
    for name, given, answer, said in (
            ("all_inputs", {"of": found}, inputs - 1, "too low: one state for each parameter"),
            ("saved_bytes", graphs, 2 * weight.nbytes, "too high: a write of each gradient is left"),
            ("saved_bytes", graphs, weight.numel(), "too low: elements, not bytes")):
        assert grade(lesson.checkpoint(name).check, answer, given)[:2] == (0.0, said)


def test_the_size_where_launches_take_as_long_as_the_work_and_answers_on_either_side():
    tail = TAILS["llama3_full_inductor_cudagraph"]
    truth = even_size(1000, tail)
    assert round(even_size(374_360_064, TAILS["compile"]) / 1e6) == 373  # what the lesson says of torch.compile's row
    assert solved.tips(1000, tail) == truth and truth * tail.gpu_ms == pytest.approx(1000 * tail.cpu_ms)
    check = load_lesson(LESSON).checkpoint("tips").check
    inverse, share = 1000 * tail.gpu_ms / tail.cpu_ms, round(tail.cpu_ms / tail.gpu_ms, 2)
    for answer, said in ((truth, "right"), (2000, "too high"),
                         (inverse, "too high: the ratio of the two times is the other way round"),
                         (share, "a share of the traced model, not a number of elements"),
                         (truth * tail.gpu_ms / (tail.gpu_ms + tail.clip_ms), "too low")):
        assert grade(check, answer, {"size": 1000, "tail": tail})[1] == said


TAILS = {name: tail_of(read_order([recorded_trace(name)]).traced[-1])
         for name in ("eager", "compile", "llama3_full_inductor", "llama3_full_inductor_cudagraph")}


def test_a_file_of_steps_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(whole_steps, "RECORDED", tmp_path / "none.jsonl")
    with pytest.raises(WorkbenchError, match="no such file: run from a checkout"):
        recorded()
