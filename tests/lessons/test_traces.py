"""The traces of "Read your own trace", and its graders with answers that are wrong in one way."""

from functools import cache

import pytest

from workbench.lab.traces import read_order
from workbench_lessons.course.lesson import load_lesson
from workbench_lessons.l14_read_your_own_trace import solution as solved
from workbench_lessons.l14_read_your_own_trace import traces_graded
from workbench_lessons.l14_read_your_own_trace.traces import (
    files_of,
    gaps_of,
    kinds_of,
    late_ms,
    late_parts,
    recorded,
    report,
    save_spans,
    third_job,
)
from workbench_lessons.l14_read_your_own_trace.traces_graded import exposes, lateness, remedies

SPANS = [("a", 7, 10, 20, 120), ("nccl b", 20, 15, 40, 180), ("b", 7, 20, 180, 280), ("c", 7, 325, 330, 400)]


def talks(name):
    return name.startswith("nccl")


def hidden_by_none(spans):
    return sum(end - begin for name, *_, begin, end in spans if talks(name))


def hidden_by_each(spans):
    """Wrong: takes off what each matmul hides, as if no two matmuls ran at once."""
    busy = [span for span in spans if not talks(span[0])]
    return hidden_by_none(spans) - sum(max(0, min(e, y) - max(b, x)) for n, *_, b, e in spans if talks(n)
                                       for *_, x, y in busy)


def test_a_wrong_exposed_time_is_told_by_its_case_and_meets_its_hint():
    reacts = load_lesson("14_read_your_own_trace").checkpoint("exposed_time").reacts
    for case, function in (("one matmul", hidden_by_none), ("two matmuls at once", hidden_by_each)):
        score, message = exposes(function)
        assert score < 1 and message.startswith(f"wrong with {case}: got ")
        assert [words for words in reacts if words in message] == [case]


@pytest.mark.integration
def test_the_solutions_are_right_and_a_wrong_answer_is_told_how(monkeypatch):
    monkeypatch.setattr(traces_graded, "third_job", cache(third_job))  # which reads two long files
    eager = read_order([recorded("eager")]).traced[-1]
    assert exposes(solved.exposed_time()) == (1.0, "right")
    assert exposes(lambda spans: spans[99]) == (0.0, "wrong with one matmul: IndexError: list index out of range")
    assert exposes(3) == (0.0, "give a function of a list of spans")
    first, later = solved.late(gaps_of, eager)
    assert late_parts(eager) == pytest.approx((first, later)) and first + later == pytest.approx(late_ms(eager))
    assert lateness((first, later)) == (1.0, "right") and lateness([first, first]) == (0.5, "later too high")
    assert lateness((later, later / 2)) == (0.0, "in the first 2 ms too low; later too low")
    name, most = solved.remedy(kinds_of, third_job())
    said = "right: with torch.compile for each block, a step takes 122.9 ms instead of 134.1"
    assert remedies((name, most)) == remedies(["Fusion", 29]) == (1.0, said)
    overlap = "not overlap: 7.5 ms are exposed at most"
    for wrong, words in (("cudagraph", "not cudagraph: the CPU is late for 10.1 ms"), ("Buckets", overlap),
                         ("read", "name one of the three remedies")):
        assert remedies((wrong, most)) == (0.0, words)
    kinds = kinds_of(third_job().traced[-1])
    summed = remedies((name, kinds["copies"] + kinds["rest"]))
    assert summed == (0.5, "milliseconds of all copies and `rest`")
    for words in (summed[1], remedies(("cudagraph", 1))[1]):
        reacts = load_lesson("14_read_your_own_trace").checkpoint("remedy").reacts
        assert len([key for key in reacts if key in words]) == 1
    assert remedies((name, 6.7)) == (0.5, "milliseconds too low")
    assert remedies(most) == (0.0, "give a pair: (remedy, milliseconds)")
    assert lateness(first) == (0.0, "give a pair of numbers: (in the first 2 ms, later)")


def test_what_is_written_by_hand_reads_as_a_trace(tmp_path):
    order = read_order([save_spans(SPANS, tmp_path / "t.json")])
    step, traced = order.steps[0], order.traced[0]
    assert (step.exposed_ms, step.idle_ms, step.launches) == (0.06, 0.05, 4)
    assert {kind: ms for kind, ms in kinds_of(traced).items() if ms} == {"rest": 0.27}
    assert list(gaps_of(traced)) == [(280, 330, 325)] and late_ms(traced) == 0.05
    early = save_spans([*SPANS[:3], ("c", 7, 200, 330, 400)], tmp_path / "early.json")
    assert late_ms(read_order([early]).traced[0]) == 0


def test_a_report_of_one_rank_tells_what_is_exposed_and_asks_for_the_others(tmp_path):
    folder = recorded("compile", 0, 2).parent
    alone = report(files_of(f"{folder}/compile.rank1.json.gz"))
    assert "ProfilerStep#2 of rank 1" in alone
    assert "36 AllGather: exposed 42.22 ms; waits: read all ranks' traces" in alone
    short_step = report([save_spans(SPANS, tmp_path / "t.json")])
    assert "of rank" not in short_step and "0.00 ms in gaps of the first 0.038 ms, for 0.05 ms later" in short_step
    assert alone.count("in gaps of the first 2 ms") == 1
