"""The traces of "Read your own trace", and its graders with answers that are wrong in one way."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.lesson import load_lesson
from workbench.tools.timing.order import read_order
from workbench_lessons.l14_read_your_own_trace import solution as solved
from workbench_lessons.l14_read_your_own_trace.traces import (
    FUSED,
    KINDS,
    THIRD,
    aligned,
    beside,
    causes,
    exposed_by,
    files_of,
    floor_kernels,
    floor_ms,
    gaps_of,
    kinds_of,
    late_ms,
    late_parts,
    late_rows,
    longest_late,
    met,
    products_of,
    profiled,
    recorded,
    report,
    save_spans,
    short,
    spans_of,
    third_job,
    timed,
    top_of,
    waits_of,
)
from workbench_lessons.l14_read_your_own_trace.traces_graded import exposes, fastest, lateness, remedies

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
    found = {"eager": read_order([recorded("eager")])}
    eager, span = found["eager"].traced[-1], found["eager"].steps[-1].span_ms
    assert exposes(solved.exposed_time()) == (1.0, "right")
    factor, (first, later) = solved.floor(kinds_of, eager, found), solved.late(gaps_of, eager)
    assert [fastest(x) for x in (factor, span / sum(kinds_of(eager).values()), 2 * factor, "?")] == [
        (1.0, "right"), (0.0, "too low"), (0.0, "too high"), (0.0, "not '?'")]
    assert late_parts(eager) == pytest.approx((first, later)) and first + later == pytest.approx(late_ms(eager))
    assert lateness((first, later)) == (1.0, "right") and lateness([first, first]) == (0.5, "later too high")
    assert lateness((later, later / 2)) == (0.0, "in the first 2 ms too low; later too low")
    name, most = solved.remedy(kinds_of, third_job())
    said = "right: with Inductor and nothing else changed, a step takes 113.8 ms instead of 131.0"
    assert remedies((name, most)) == remedies(["Fusion", 31]) == (1.0, said)
    overlap = "not overlap: 2.5 ms are exposed at most"
    for wrong, words in (("cudagraph", "not cudagraph: the CPU is late for 0.1 ms"), ("overlap", overlap),
                         ("Buckets", overlap), ("read", "name a remedy of the first section's table")):
        assert remedies((wrong, most)) == (0.0, words)
    assert {remedies((name, ms)) for ms in (27, 27.6, kinds_of(third_job().traced[-2])["rest"])} == {
        (0.5, "milliseconds of `rest` alone")}
    slip = [[(at - begin) / 1e3 for begin, _, at in gaps_of(eager) if at > begin and (begin < cut) == soon]
            for cut in [eager.events[0].begin + 2000] for soon in (True, False)]
    assert lateness([sum(part) for part in slip]) == (0.0, "these gaps end at the launch")
    divided = found["eager"].steps[-1].compute_ms / floor_ms(eager)
    assert {fastest(x) for x in (divided, round(divided, 2))} == {(0.0, "that is compute divided by the floor")}
    for point, said in (("floor", fastest(divided)), ("late", lateness([sum(part) for part in slip])),
                        ("remedy", remedies((name, 27))), ("remedy", remedies(("cudagraph", 1)))):
        reacts = load_lesson("14_read_your_own_trace").checkpoint(point).reacts
        assert len([words for words in reacts if words in said[1]]) == 1
    assert remedies((name, 6.7)) == (0.5, "milliseconds too low")
    assert remedies((name, 124)) == (0.5, "milliseconds too high")
    assert {remedies(wrong) for wrong in (None, most, name, (name,), (name, "?"))} == {
        (0.0, "give a pair: (remedy, milliseconds)")}
    for wrong in (None, first, "late", (1, 2, 3), ("a", "b")):
        assert lateness(wrong) == (0.0, "give a pair of numbers: (in the first 2 ms, later)")


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
    kept = [floor_kernels(step) for step in steps.values()]
    assert kept[0].total() > 100 and all(each == kept[0] for each in kept)
    floors = [floor_ms(step) for step in steps.values()]
    assert 0.9 < max(floors) - min(floors) < 1
    begin = steps["eager"].events[0].begin
    late = sorted((gap for gap in gaps_of(steps["eager"]) if gap[2] > gap[0]), key=lambda gap: gap[0] - gap[1])
    near_end = [gap for gap in late if gap[0] - begin > 2000]
    after = [e.name for gap in near_end for e in steps["eager"].events if e.begin == gap[1]]
    assert len(late) > 15 and len(near_end) == 2 and set(near_end) < set(late[:3])
    assert [
        f"{(gap[0] - begin) / 1e3:.0f}" for gap in near_end] == ["39", "38"]
    assert all("multi_tensor_apply" in name for name in after) and len(after) == 2
    alone = [e.name for e in steps[names[-1]].events if not e.graph and not e.name.startswith("Mem")]
    first = next(i for i, name in enumerate(alone) if "multi_tensor_apply" in name)
    assert len(alone) - first == 68 and ["FillFunctor" in name for name in alone[:first]] == [True, True]
    for step in steps.values():
        first = step.events[0].begin
        assert late_ms(step) / 2 < sum(e - b for b, e, at in gaps_of(step) if at > b and b - first < 2000) / 1e3
    lateness = {name: late_ms(step) for name, step in steps.items()}
    assert list(lateness.values()) == sorted(lateness.values(), reverse=True)
    assert round(1 - lateness[names[2]] / lateness["compile"], 1) == 0.7
    kernels = {name: Counter(e.name for e in steps[name].events if e.name[:3] != "Mem") for name in names[2:]}
    assert kernels[names[2]] == kernels[names[3]] and kernels[names[2]].total() == 306
    assert [len(steps[name].events) for name in names[2:]] == [378, 382]
    assert all(late_parts(steps[name])[1] == pytest.approx(0, abs=1e-6) for name in names[2:])
    assert [row[1:] for row in late_rows({"a": steps["eager"], "b": steps[names[2]]}, {"a": None})] == [
        ("3.05", "?", "?", "?", "538", "36.9", "37.5"), ("1.04", "0.43", "0.00", "0.61", "309", "11.1", "28.5")]
    assert late_rows({"recorded": steps[names[3]]}, {})[0][5] == "8"
    spans, idle, compute = ([getattr(read_order([recorded(name)]).steps[-1], f"{part}_ms") for name in names[2:]]
                            for part in ("span", "idle", "compute"))
    assert 0 < idle[0] - idle[1] < spans[0] - spans[1] and compute[0] - compute[1] < max(floors) - min(floors)


def test_what_the_text_says_of_the_timed_steps():
    names = ("eager", "compile", "llama3_full_inductor", "llama3_full_inductor_cudagraph")
    clock = {name: sorted(timed(name)) for name in names}
    middle = {name: times[12] for name, times in clock.items()}
    assert all(len(times) == 25 for times in clock.values())
    assert round(middle["compile"] - middle["eager"]) == 3 and round(middle[names[2]] - middle[names[3]], 1) == 4.7
    assert round(clock["eager"][0] - clock["compile"][0]) == 3
    assert round(clock[names[3]][0] - clock[names[2]][0], 1) == 0.4
    assert all(clock[name][-1] < clock["eager"][0] for name in names[2:])
    two_clusters = clock["compile"]
    assert [round(part[i]) for part in (two_clusters[-15:], two_clusters[:9]) for i in (0, -1)] == [43, 47, 37, 38]
    in_time = timed("compile")
    assert max(in_time[-9:]) < in_time[15] < min(in_time[:15])
    assert [f"{two_clusters[i]:.1f}" for i in (0, 8)] == ["37.5", "38.4"]
    assert round(two_clusters[9]) == 40 and len(two_clusters) == 25
    assert two_clusters[8] < clock["eager"][0] and two_clusters[9] < middle["eager"] < two_clusters[-15]
    eager, compiled = (read_order([recorded(name)]).steps[-1].span_ms for name in names[:2])
    assert [f"{ms:.1f}" for ms in (eager - compiled, eager - middle["eager"])] == ["4.1", "1.8"]
    assert all(two_clusters[0] < s.span_ms < two_clusters[9] for s in read_order([recorded("compile")]).steps)
    assert max(s.span_ms for s in read_order([recorded(names[3])]).steps) < clock[names[3]][0]
    two = {name: sorted(timed(name, 2)) for name in ("compile", OURS)}
    assert all(len(times) == 50 for times in two.values())
    assert round(two["compile"][25]) in (122, 123) and 9 <= two["compile"][25] - two[OURS][25] < 10
    traces = {name: read_order([recorded(name, 0, 2)]).steps for name in two}
    assert min(s.span_ms for s in traces["compile"]) > two["compile"][-1] + 30
    last = traces["compile"][-1]
    assert round(two["compile"][25] - last.compute_ms) == 17 and round(last.exposed_ms + last.idle_ms) == 78
    assert all(abs(s.span_ms / two[OURS][25] - 1) < 0.03 for s in traces[OURS])
    assert all(s.span_ms > two["compile"][25] + (60 if s.step == last.step else 45)
               for s in read_order([recorded("compile", rank, 2) for rank in (0, 1)]).steps)
    inductor = read_order([recorded(names[2])]).steps
    assert all(4.7 < middle[names[2]] - s.span_ms < 5.1 for s in inductor)
    fast = median(two_clusters[:9]), read_order([recorded("compile")]).steps[-1].compute_ms
    assert f"{fast[0]:.1f} - {fast[1]:.1f} = {fast[0] - fast[1]:.1f}" == "38.1 - 36.0 = 2.1"
    less = [round(two_clusters[i] - clock[names[2]][i], digits) for i, digits in ((12, 1), (0, 1), (-1, 0))]
    assert less == [6.2, 5.3, 7]
    for a, b in combinations(names, 2):  # every other order is open
        assert (a == "eager" and b != "compile") == (clock[b][-1] < clock[a][0]) and clock[a][-1] > clock[b][0]
    compute = read_order([recorded("compile")]).steps[-1].compute_ms
    assert f"{middle['compile']:.1f} - {compute:.1f} = {middle['compile'] - compute:.1f}" == "44.0 - 36.0 = 8.0"
    wins = compute - read_order([recorded(names[2])]).steps[-1].compute_ms, middle["compile"] - middle[names[2]]
    assert [f"{ms:.1f}" for ms in wins] == ["4.0", "6.2"]
    third = third_job()
    assert all(median(timed(THIRD, 2)) - s.compute_ms < 8 and s.exposed_ms + s.idle_ms < 6 for s in third.steps)
    for traced in third.traced:  # a block's gather begins before the seven products of the block before it
        names_of = [e.name for e in traced.events]
        starts = [i for i, name in enumerate(names_of) if "AllGather" in name][2:]
        assert len(starts) == 16 and [sum("nvjet" in name for name in names_of[:i]) for i in starts] == [
            7 * n for n in range(16)]
    assert all(s.exposed_ms < 0.13 * s.communication_ms for s in third.steps)
    assert [s.rank for s in third.steps[1::2]] == [0, 1] and len(timed(FUSED, 2)) == len(timed(THIRD, 2)) == 50
    assert [round(a.span_ms - b.span_ms) for a, b in zip(traces["compile"], traces[OURS], strict=True)] == [61, 73]


OURS = "llama3_full_inductor_block_bucketing_overlap_cudagraph"


def test_what_the_text_says_of_the_two_ranks():
    found = {}
    for name in ("compile", OURS):
        order = read_order([recorded(name, rank, 2) for rank in (0, 1)])
        for step, traced in zip(order.steps, order.traced, strict=True):
            rows = exposed_by(step, traced)
            assert sum(row[1] for row in rows) == len(step.collectives)
            assert sum(row[3] for row in rows) == pytest.approx(step.exposed_ms, rel=0.01)
            assert all(0 <= row[4] <= row[5] + 1e-9 <= row[3] + 2e-9 for row in rows)
            assert causes(step, traced)[0] == (36 if name == "compile" else 18)
            assert causes(step, traced)[2] == pytest.approx(sum(row[4] for row in rows))
            found[name, step.rank] = step, *(sum(row[i] for row in rows) for i in (5, 6)), sum(row[4] for row in rows)
    step, waits, empty, _ = found["compile", 0]
    assert step.idle_ms > step.span_ms / 3.1 and waits < 0.1 and empty > 0.98 * step.exposed_ms
    assert step.exposed_ms > 0.6 * step.communication_ms
    step, waits, empty, least = found["compile", 1]
    assert [f"{ms:.1f}" for ms in (least, step.exposed_ms - least)] == ["46.1", "8.8"]
    clock = sorted(timed("compile", 2))
    assert [round(found["compile", rank][0].span_ms - (clock[24] + clock[25]) / 2) for rank in (0, 1)] == [61, 62]
    assert found["compile", 0][0].launches == step.launches
    assert (round(step.exposed_ms), f"{step.exposed_ms:.1f}") == (55, "54.9")
    assert step.compute_ms > max(sorted(timed("compile", 2))[25], found["compile", 0][0].compute_ms)
    assert step.idle_ms < 1 and waits > 0.95 * step.exposed_ms and empty < 0.1 * step.exposed_ms
    assert all(found[OURS, rank][2] < 0.001 and found[OURS, rank][0].exposed_ms < 4 for rank in (0, 1))
    step, waits, _, least = found[OURS, 1]
    assert [f"{ms:.1f}" for ms in (step.exposed_ms, least, waits)] == ["3.4", "1.5", "2.3"]
    late = read_order([recorded("compile", 0, 2)]).traced[-1]
    assert [f"{ms:.1f}" for ms in (late_ms(late), found["compile", 0][0].idle_ms)] == ["60.4", "62.4"]


def test_what_the_text_says_of_compute_on_two_ranks():
    orders = {name: read_order([recorded(name, rank, 2) for rank in (0, 1)]) for name in ("compile", OURS)}
    (zero, one), (ours, _) = ([t for s, t in zip(o.steps, o.traced, strict=True) if s.step == o.steps[-1].step]
                              for o in orders.values())
    (n, here, there), (m, alone, alone_there), (others, *_) = beside(one, zero)
    assert (n, m, others) == (279, 43, 17)
    assert n > 200 and round(here / there, 2) == 1.42 and alone == pytest.approx(alone_there, rel=0.02)
    before, after = kinds_of(zero), kinds_of(ours)
    assert round(sum(before[kind] - after[kind] for kind in ("copies", "rest"))) == 8
    assert round(after["products"] - before["products"]) == 7 and beside(zero, zero)[0][0] == 0
    products = [Counter(e.name for e in step.events if any(p in e.name for p in KINDS["products"]))
                for step in (zero, ours)]
    assert products[0] == products[1] and products[0].total() == 339
    assert [sum(share > 0.5 for *_, share in products_of(step)) for step in (zero, one, ours)] == [4, 286, 33]
    compute = next(s.compute_ms for s in orders["compile"].steps[::-1] if s.rank == 0)
    assert round(compute - floor_ms(zero)) == 17
    three = [[s.collectives[i] for s in orders["compile"].steps if s.step == orders["compile"].steps[-1].step]
             for i in (0, 40, 52)]
    assert [f"{spans[0][3] / 1e3:.0f}" for spans in aligned([zero, one])] == ["8", "0"]
    assert [r0.ms < r1.ms for r0, r1 in three] == [True] * 3
    waits = waits_of([(r1, r0) for r0, r1 in three])
    assert [(i, *(f"{ms:.2f}" for ms in row)) for i, *row in waits] == [
        (0, "8.26", "8.16", "8.26"), (40, "4.48", "0.00", "0.18"), (52, "3.86", "3.50", "3.86")]
    losses = [[begin for name, _, _, begin, _ in spans if "cunn_SoftMaxForward" in name]
              for spans in aligned([zero, one])]
    assert all(round(begin / 1e3) in (75, 76) for (begin,) in losses)
    assert [r1.exposed_ms > r0.ms for r0, r1 in three] == [True, False, True]


def test_a_gather_on_paper_lasts_until_the_last_rank_has_come():
    ranks = met({"rank 0": 100, "rank 1": 20}, transfer=30)
    assert {rank: end - begin for rank, ((*_, begin, end),) in ranks.items()} == {"rank 0": 30, "rank 1": 110}


def test_a_report_of_all_ranks_tells_what_is_exposed_and_why(tmp_path):
    folder = recorded("compile", 0, 2).parent
    files = files_of(f"{folder}/compile.rank*.json.gz")
    assert [Path(f).name for f in files] == ["compile.rank0.json.gz", "compile.rank1.json.gz"]
    assert files_of("none.json") == ["none.json"]
    text = report(files)
    assert ("36 AllGather: exposed 42.22 ms; waits for another rank 35.51 to 41.95 ms; "
            "the CPU was late 1.66 ms") in text
    assert text.count("compute less the floor") == 2
    alone = report(files[1:])
    assert "ProfilerStep#2 of rank 1" in alone
    assert "36 AllGather: exposed 42.22 ms; waits: read all ranks' traces" in alone
    short_step = report([save_spans(SPANS, tmp_path / "t.json")])
    assert "of rank" not in short_step and "0.00 ms in gaps of the first 0.038 ms, for 0.05 ms later" in short_step
    assert text.count("in gaps of the first 2 ms") == 2


def test_late_gaps_are_listed_with_their_kernels():
    eager = read_order([recorded("eager")]).traced[-1]
    for most in (3, 15):
        rows, line = longest_late(eager, most)
        assert len(rows) == most and f"the longest {most} are listed; 575 in which" in line
        assert rows[0][0] == "39.1" and rows[0][3].startswith("multi_tensor_apply") and rows[1][0] == "1.0"
    assert top_of(eager, "rest")[0][0] == "vectorized_elementwise_kernel bfloat16_copy_kernel_cuda"
    assert short("Memset (Device)") == "Memset"


def test_spans_of_a_step_read_as_the_step(tmp_path):
    order = read_order([recorded("compile", 1, 2)])
    again = read_order([save_spans(spans_of(order.traced[-1]), tmp_path / "t.json")]).steps[0]
    for name in ("span_ms", "compute_ms", "exposed_ms", "idle_ms"):
        assert getattr(again, name) == pytest.approx(getattr(order.steps[-1], name))


def test_ranks_are_aligned_at_the_end_of_their_first_collective():
    ranks = [order.traced[-1] for order in (read_order([recorded("compile", rank, 2)]) for rank in (0, 1))]
    moved = aligned(ranks)
    ends = [[end for name, *_, end in spans if talks(name)] for spans in moved]
    assert min(spans[0][3] for spans in moved) == 0 and ends[0][0] == pytest.approx(ends[1][0])
    assert all(abs(a - b) < 50 for a, b in zip(ends[0][:3], ends[1][:3], strict=True))  # µs: so are the next ones
    for spans, step in zip(moved, ranks, strict=True):
        assert [end - begin for *_, begin, end in spans] == pytest.approx([e.end - e.begin for e in step.events])


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
