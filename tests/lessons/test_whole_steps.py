"""What "One graph for the whole step" counts and says, and its graders with answers that are wrong in one way."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from workbench import Update, author_module, capture, join, partition, run_partitioned
from workbench.authoring.plans import ParallelPlan
from workbench.errors import WorkbenchError
from workbench.notebook.lessons.grading import grade
from workbench.notebook.lessons.lesson import load_lesson
from workbench.tools.timing.order import read_order
from workbench.world.mesh import World
from workbench_lessons.l14_read_your_own_trace.traces import recorded as recorded_trace
from workbench_lessons.l15_one_graph_for_the_whole_step import solution as solved
from workbench_lessons.l15_one_graph_for_the_whole_step import whole_steps
from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import (
    added_passes,
    calls_of_loop,
    even_size,
    finds,
    gradients_read,
    late_reads,
    launches_of,
    lines_of,
    on_two_gpus,
    recorded,
    tail_of,
    tail_pace,
    traffic,
)

ROOT = Path(__file__).parents[2]
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


def test_the_program_of_the_task_is_the_notebook_s_and_one_mistake_costs_its_cases():
    (cell,) = (c["source"] for c in json.loads((ROOT / "notebooks" / f"{LESSON}.ipynb").read_text())["cells"]
               if c["metadata"].get("tags") == ["checkpoint", "late"])
    given: dict = {}
    exec("".join(cell).partition("answer")[0], given)
    assert given["program"] == whole_steps.TASK and late_reads(whole_steps.TASK) == {"w": "mm"}
    assert finds(one_view)[0] == 6 / 7 and finds(last_reader)[0] == 5 / 7


def test_lint_finds_late_reads_by_the_input_and_its_first_reader():
    rows = [("w", "input", ()), ("v", "input", ()), ("t", "view", ("w",)), ("up", "update", ("w", "v")),
            ("mm", "compute", ("v", "t")), ("up_1", "update", ("v", "w"))]
    assert late_reads(rows) == {"w": "mm"} and late_reads(rows[:4]) == {}


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


def test_what_the_lesson_says_of_the_recorded_tails():
    for tail in TAILS.values():
        assert tail.cpu_ms < tail.gpu_ms and 0 <= tail.late_ms <= tail.idle_ms < 1
    assert [tail.late_ms > 0.1 for tail in TAILS.values()] == [True, True, False, False]
    recorded_tail = TAILS["llama3_full_inductor_cudagraph"]
    assert recorded_tail.late_ms == 0 == TAILS["llama3_full_inductor"].late_ms
    rates = [12 / recorded_tail.clip_ms, 28 / recorded_tail.adamw_ms]
    assert max(rates) < 1.1 * min(rates) and 2 / 3 < 374_360_064 * min(rates) / 4.8e9 < 1
    ahead = [tail.ahead_ms for tail in TAILS.values()]
    assert all(0.7 < ms < 2.3 for ms in ahead[:2]) and min(ahead[2:]) > 10
    assert {tail.launches for tail in TAILS.values()} == {69}
    times = [tail.cpu_ms for tail in TAILS.values()]
    assert [f"{ms:.2f}" for ms in (min(times), max(times))] == ["1.75", "4.35"]
    assert all(0.8 < tail.cpu_ms - tail.longest_ms < 1.2 for tail in TAILS.values())
    assert [f"{tail.late_ms:.1f}" for tail in TAILS.values()] == ["0.7", "0.3", "0.0", "0.0"]


@pytest.mark.parametrize("name", TAILS)
def test_the_longest_gaps_of_a_tail_lie_between_two_kernels(name):
    step = read_order([recorded_trace(name)]).traced[-1]
    tail = sorted((e for e in step.events[whole_steps._first_of_tail(step):] if e.launched is not None),
                  key=lambda event: event.launched)
    longest = sorted(pairwise(tail), key=lambda pair: pair[1].launched - pair[0].launched)[-6:]
    assert all(before.name != after.name for before, after in longest)
    scaling_ends = next((a, b) for a, b in pairwise(tail) if "BinaryOpScalarTensor" in a.name != b.name)
    assert scaling_ends in longest


@pytest.mark.parametrize("name", TAILS)
def test_a_tail_s_pace_begins_with_its_first_launch_and_shows_the_work_before(name):
    tail, pace = TAILS[name], tail_pace(read_order([recorded_trace(name)]).traced[-1])
    assert pace.launches == tail.launches and pace.cpu_us / 1e3 == pytest.approx(tail.cpu_ms)
    assert pace.step_us / 1e3 == pytest.approx(0.05 + tail.ahead_ms + tail.gpu_ms + tail.idle_ms, abs=0.05)
    own = sum(end - max(begin, pace.before_us) for begin, end in pace.worked if end > pace.before_us)
    assert pace.step_us - pace.before_us - own == pytest.approx(1e3 * tail.idle_ms, abs=1)
    assert "bound by" not in str(pace) and f"waits {tail.idle_ms:.2f} ms" in str(pace)
    assert pace.started[0] == (40, 50) and pace.worked[0][0] == 0 and pace.worked[-1][1] == pace.step_us
    assert 1 < len(pace.started) < tail.launches and tail.gpu_ms < pace.gpu_us / 1e3 <= pace.step_us / 1e3


@pytest.mark.parametrize("name", TAILS)
def test_most_launches_of_a_tail_follow_its_elements(name):
    assert launches_of(read_order([recorded_trace(name)]).traced[-1]) == {"norm": 18, "scaling": 18, "AdamW": 18}
    assert 18 == -(-374_360_064 // (320 * 65_536))  # a launch has 320 chunks of 65,536 elements at most


def test_a_tail_s_times_are_those_of_its_events():
    traced = read_order([recorded_trace("llama3_full_inductor_cudagraph")]).traced[-1]
    tail = TAILS["llama3_full_inductor_cudagraph"]
    *_, last = (i for i, event in enumerate(traced.events) if event.graph)  # the end of the backward's recording
    assert tail.gpu_ms + tail.idle_ms == pytest.approx((traced.events[-1].end - traced.events[last].end) / 1e3)
    assert traced.launches - tail.launches == 3  # two graphs, and the fill of the tangent


def test_what_the_lesson_says_of_the_steps_on_a_gpu():
    rows = {(row["step"], len(row["passes"])): row for row in recorded()}
    outside, outside_recorded, inside, inside_recorded = (
        rows[key] for key in (("pair", 1), ("pair", 2), ("whole", 1), ("whole", 2)))
    assert all(a["step_ms"] < 1.015 * b["step_ms"] for a, b in combinations(rows.values(), 2))
    assert min(rows.values(), key=lambda row: row["step_ms"]) is outside_recorded
    assert (outside_recorded["launches"], inside_recorded["launches"]) == (3, 1)
    assert (inside["launches"], outside["launches"]) == (1299, 897) and 1_104_218_112 < 4 * 374_360_064
    assert 1299 - 897 - 4 * TAILS["llama3_full_inductor"].launches == 126
    tails = inside["kernels_ms"] - outside["kernels_ms"], inside_recorded["kernels_ms"] - outside_recorded["kernels_ms"]
    assert [f"{ms:.1f}" for ms in sorted(tails)] == ["10.9", "13.5"]
    steps = sorted(row["step_ms"] for row in rows.values())
    assert steps[0] > 108.5 and steps[-1] < 110 and f"{steps[-1] - steps[0]:.1f}" == "1.2"
    assert f"{(outside_recorded['peak_bytes'] - inside_recorded['peak_bytes']) / 2**30:.1f}" == "2.7"
    assert f"{(inside_recorded['peak_bytes'] - outside['peak_bytes']) / 2**30:.1f}" == "0.7"
    assert f"{(inside['peak_bytes'] - outside['peak_bytes']) / 2**30:.1f}" == "0.7"
    tail_ms = TAILS["llama3_full_inductor_cudagraph"].gpu_ms * 1_104_218_112 / 374_360_064  # by its elements
    idle = [row["step_ms"] - row["kernels_ms"] for row in (outside_recorded, inside_recorded)]
    assert 12.5 < tail_ms < 13.5 and 0 < idle[1] - (idle[0] - tail_ms) < max(tails) - min(tails)
    assert [f"{ms:.1f}" for ms in (*sorted(idle[0] - ms for ms in (*tails, tail_ms)), idle[1])] == [
        "1.0", "1.6", "3.6", "3.9"]  # the pair by three estimates of its tail, then the joined step
    assert [f"{idle[1] - (idle[0] - ms):.1f}" for ms in sorted(tails)] == ["0.3", "2.9"]
    assert all(1 / 10 < ms / outside_recorded["step_ms"] < 1 / 8 for ms in (*tails, tail_ms))
    kernels = [f"{row['kernels_ms']:.1f}" for row in (outside, outside_recorded)]
    assert kernels == ["92.1", "94.2"] and max(tails) - min(tails) < 2 * (94.2 - 92.1)
    assert min(rows.values(), key=lambda row: row["peak_bytes"]) is outside
    assert inside_recorded["peak_bytes"] < outside_recorded["peak_bytes"]
    assert outside["peak_bytes"] < inside["peak_bytes"] < 1.05 * outside["peak_bytes"]


def test_a_file_of_steps_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(whole_steps, "RECORDED", tmp_path / "none.jsonl")
    with pytest.raises(WorkbenchError, match="no such file: run from a checkout"):
        recorded()


def test_what_the_lesson_says_of_two_gpus():
    small, large = on_two_gpus("1b"), on_two_gpus("8b")
    names = ["llama3_calibrated_cudagraph", "llama3_whole_step_cudagraph", "llama3_whole_step_fused_cudagraph"]
    assert [name in large for name in ("compile", *names)] == [True, False, False, True]
    times = [[small[name][given]["step_ms"] for name in names] for given in (0, 1)]
    assert all(min(each) == each[0] > max(each) - 1 for each in times)  # the pair
    runs = [small[name] for name in ("compile", *names)]  # those of the table
    apart = sorted(abs(round(first["step_ms"], 1) - round(second["step_ms"], 1)) for first, second in runs)
    assert f"{apart[0]:.1f} to {apart[-1]:.1f}" == "1.2 to 2.2" and apart[0] > 1
    assert len({first["round"] for first, _ in runs}) == len({second["round"] for _, second in runs}) == 1
    assert times[0][2] < times[0][1] and times[1][2] > times[1][1]  # with fused_clip_adamw: faster, slower
    compiled = sum(run["step_ms"] for run in small["compile"])
    wins = [1 - sum(each) / compiled for each in zip(*times, strict=True)]
    assert f"{wins[0]:.0%}" == "7%" and max(wins) - min(wins) < 0.005
    pair, fused = ([each["name"] for each in small[name][0]["passes"]] for name in (names[0], names[2]))
    assert [name for name in fused if name != "fused_clip_adamw"] == pair
    assert [each["name"] for each in large[names[2]][0]["passes"]] == fused
    of = [added_passes(found[name][0], small[names[0]][0]) for found, name in (
        (small, "compile"), (small, names[1]), (small, names[2]), (large, names[2]))]
    assert of == ["none", "P", "P + fused_clip_adamw", "P + fused_clip_adamw"]
    assert added_passes({"passes": [{"name": "a"}]}, {"passes": [{"name": "b"}]}) == "a"
    ours, theirs = large[names[2]], large["compile"]
    saved = 1 - sum(run["step_ms"] for run in ours) / sum(run["step_ms"] for run in theirs)
    assert f"{saved:.0%}" == "9%" and (ours[0]["launches"], theirs[0]["launches"]) == (1, 3022)
    held = [max(run["reserved_gib"] for run in runs) for runs in (theirs, ours)]
    assert 8.5 < held[0] - held[1] < 9


@pytest.mark.parametrize("parameters", [1, 21])
def test_the_loop_s_tail_calls_ten_operators_whatever_the_number_of_parameters(parameters):
    given = [torch.ones(3) for _ in range(parameters)]
    assert len(calls_of_loop(given)) == 10 and all(not given[0].grad_fn and p.equal(torch.ones(3)) for p in given)
