"""The traces of "Read your own trace", and its graders with answers that are wrong in one way."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.grading import grade
from workbench.notebook.lessons.lesson import load_lesson
from workbench.notebook.lessons.traces import (
    KINDS,
    exposes,
    floor_ms,
    gaps_of,
    kinds_of,
    late_ms,
    profiled,
    recorded,
    save_spans,
)
from workbench.tools.timing.order import read_order

ROOT = Path(__file__).parents[3]
SPANS = [("a", 7, 10, 20, 120), ("nccl b", 20, 15, 40, 180), ("b", 7, 20, 180, 280), ("c", 7, 325, 330, 400)]


def talks(name):
    return name.startswith("nccl")


def one_product_each(spans):
    """Wrong: takes off what each product hides, as if no two products ran at once."""
    busy = [s for s in spans if not talks(s[0])]
    return sum(e - b - sum(max(0, min(e, y) - max(b, x)) for *_, x, y in busy) for n, *_, b, e in spans if talks(n))


def each_collective(spans):
    """Wrong: counts the same microsecond for each collective."""
    cuts = sorted({t for *_, b, e in spans for t in (b, e)})
    return sum((b - a) * sum(talks(s[0]) for s in own) for a, b in pairwise(cuts)
               if (own := [s for s in spans if s[3] <= a and b <= s[4]]) and all(talks(s[0]) for s in own))


def not_computing(spans):
    """Wrong: idle time is exposed, too."""
    cuts = sorted({t for *_, b, e in spans for t in (b, e)})
    return sum(b - a for a, b in pairwise(cuts)
               if all(talks(s[0]) for s in spans if s[3] <= a and b <= s[4]))


WRONG = {
    "one product": lambda spans: sum(e - b for n, *_, b, e in spans if talks(n)),
    "a hidden collective": lambda spans: max(50, one_product_each(spans)),
    "idle time": not_computing, "two products at once": one_product_each, "two collectives at once": each_collective,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_exposed_time_is_told_by_its_case_and_meets_its_hint(case):
    score, message = exposes(WRONG[case])
    assert score < 1 and message.startswith(f"wrong with {case}: got ")
    assert [words for words in load_lesson("14_read_your_own_trace").checkpoint("exposed_time").reacts
            if words in message] == [case]


def test_a_function_that_raises_and_what_is_no_function_are_refused_in_words():
    assert exposes(lambda spans: spans[99]) == (0.0, "wrong with one product: IndexError: list index out of range")
    assert exposes(3) == (0.0, "give a function of a list of spans")


def test_the_solutions_are_right_and_a_wrong_number_is_told_by_its_side():
    spec = importlib.util.spec_from_file_location("solved", ROOT / "lessons/solutions/14_read_your_own_trace.py")
    solved = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solved)
    eager = read_order([recorded("eager")]).traced[-1]
    assert exposes(solved.exposed_time()) == (1.0, "right")
    for answer, truth, above in ((solved.floor(kinds_of, eager), floor_ms(eager), sum(kinds_of(eager).values())),
                                 (solved.late(gaps_of, eager), late_ms(eager),
                                  sum(end - begin for begin, end, _ in gaps_of(eager)) / 1e3)):
        near = {"truth": truth, "within": 0.01}
        assert [grade("workbench.notebook.lessons.traces:near", a, near)[:2] for a in (answer, above, truth / 2)] == [
            (1.0, "right"), (0.0, "too high"), (0.0, "too low")]


def test_what_is_written_by_hand_reads_as_a_trace(tmp_path):
    order = read_order([save_spans(SPANS, tmp_path / "t.json")])
    step, traced = order.steps[0], order.traced[0]
    assert (step.exposed_ms, step.idle_ms, step.launches) == (0.06, 0.05, 4)
    assert {kind: ms for kind, ms in kinds_of(traced).items() if ms} == {"rest": 0.27}
    assert list(gaps_of(traced)) == [(280, 330, 325)] and late_ms(traced) == 0.05
    early = save_spans([*SPANS[:3], ("c", 7, 200, 330, 400)], tmp_path / "early.json")
    assert late_ms(read_order([early]).traced[0]) == 0


@pytest.mark.parametrize("name", ["eager", "compile", "llama3_full_inductor", "llama3_full_inductor_cudagraph"])
def test_kinds_and_gaps_of_the_recorded_traces_add_up(name):
    """Copies on a second stream may run while others compute, so kinds are at least the time that is computed."""
    order = read_order([recorded(name)])
    step, traced = order.steps[-1], order.traced[-1]
    kinds = kinds_of(traced)
    assert step.compute_ms - 1e-6 <= sum(kinds.values()) < 1.03 * step.compute_ms and min(kinds.values()) > 0
    assert sum(end - begin for begin, end, _ in gaps_of(traced)) / 1e3 == pytest.approx(step.idle_ms)
    assert 0 < late_ms(traced) < step.idle_ms and floor_ms(traced) < step.compute_ms


def test_what_the_text_says_of_the_four_traces():
    names = ("eager", "compile", "llama3_full_inductor", "llama3_full_inductor_cudagraph")
    steps = {name: read_order([recorded(name)]).traced[-1] for name in names}
    kept = [Counter(e.name for e in step.events if any(part in e.name for kind in ("products", "attention", "optimizer")
                                                       for part in KINDS[kind])) for step in steps.values()]
    assert kept[0].total() > 100 and all(each == kept[0] for each in kept)
    floors = [floor_ms(step) for step in steps.values()]
    assert 0.9 < max(floors) - min(floors) < 1
    begin = steps["eager"].events[0].begin
    late = sorted((gap for gap in gaps_of(steps["eager"]) if gap[2] > gap[0]), key=lambda gap: gap[0] - gap[1])
    near_end = [gap for gap in late if gap[0] - begin > 2000]
    after = [e.name for gap in near_end for e in steps["eager"].events if e.begin == gap[1]]
    assert len(late) > 15 and len(near_end) == 2 and set(near_end) < set(late[:3])
    assert all("multi_tensor_apply" in name for name in after) and len(after) == 2
    alone = [e.name for e in steps[names[-1]].events if not e.graph and not e.name.startswith("Mem")]
    first = next(i for i, name in enumerate(alone) if "multi_tensor_apply" in name)
    assert len(alone) - first == 68 and ["FillFunctor" in name for name in alone[:first]] == [True, True]
    lines = [json.loads(line) for line in (recorded("eager").parent / "steps.jsonl").read_text().splitlines()]
    assert all(len(times) == 25 and max(times) - min(times) > 5 for times in (line["steps_ms"] for line in lines))
    fastest = {line["variant"]: min(line["steps_ms"]) for line in lines}
    assert round(fastest[names[3]] - fastest[names[2]], 1) == 0.4


def test_a_recorded_trace_that_is_not_there():
    with pytest.raises(WorkbenchError, match=r"no such recorded trace: there are compile, eager, llama3_full_inductor"):
        recorded("reference")


def test_a_trace_of_a_cpu_has_operators_and_is_refused(tmp_path, capfd):
    import torch

    path = profiled(lambda: torch.ones(4, requires_grad=True).sum().backward(), tmp_path / "own.json")
    if torch.cuda.is_available():
        pytest.skip("a GPU's kernels are traced too")
    assert {"cpu_op"} <= {e.get("cat") for e in json.loads(path.read_text())["traceEvents"]}
    with pytest.raises(WorkbenchError, match="none of a GPU"):
        read_order([path])
    print("heard")
    assert capfd.readouterr().out == "heard\n"
