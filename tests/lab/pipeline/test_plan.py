"""What each rank does: torch's tables, the bubble, and schedules that would hang."""

from __future__ import annotations

import pytest

from lab.pipeline.pipelines import order_of
from workbench import WorkbenchError
from workbench.lab.pipeline.plan import Action, Plan, plan

SCHEDULES = [("GPipe", 2, 2, 4), ("1F1B", 2, 2, 4), ("GPipe", 4, 4, 8), ("1F1B", 4, 4, 8),
             ("Interleaved1F1B", 4, 8, 8), ("InterleavedZeroBubble", 4, 8, 8), ("ZBVZeroBubble", 2, 4, 4),
             ("ZBVZeroBubble", 4, 8, 8), ("DualPipeV", 4, 8, 8), ("LoopedBFS", 2, 4, 4)]


@pytest.mark.parametrize(("schedule", "ranks", "stages", "count"), SCHEDULES)
def test_each_schedule_of_torch_ends_and_runs_every_microbatch(schedule, ranks, stages, count):
    made = plan(schedule, ranks, stages, count)
    made.check()
    spans, problem = made.spans()
    forwards = [action for _, action, *_ in spans if action.kind == "F"]
    assert problem == "" and len(forwards) == len(set(forwards)) == stages * count
    assert all(sorted(order_of(made, stage)) == list(range(count)) for stage in range(stages))
    assert made.split == (schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"))


def bubble(made: Plan) -> float:
    """With forwards of one, whole backwards of two and halves of one, divided among a rank's stages."""
    own = made.stages // len(made.ranks)
    spans, _ = made.spans(lambda action: (2 if action.kind == "B" else 1) / own)
    busy = sum(end - begin for *_, begin, end in spans)
    return 1 - busy / max(end for *_, end in spans) / len(made.ranks)


@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_of_gpipe_and_1f1b_is_the_ideal_one_and_others_have_less(ranks, count):
    ideal = (ranks - 1) / (count + ranks - 1)
    assert bubble(plan("GPipe", ranks, ranks, count)) == pytest.approx(ideal)
    assert bubble(plan("1F1B", ranks, ranks, count)) == pytest.approx(ideal)
    interleaved, zero = (bubble(plan(name, ranks, 2 * ranks, count)) for name in ("Interleaved1F1B", "ZBVZeroBubble"))
    assert zero < interleaved < ideal


def computed(made: Plan) -> list[str]:
    """Each rank's computations in torch's notation."""
    rows = ([a for a in rank if len(a.kind) == 1] for rank in made.ranks)
    return [" ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row) for row in rows]


@pytest.mark.parametrize(("schedule", "orders"), [
    ("GPipe", ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
    ("1F1B", ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
])
def test_gpipe_and_1f1b_compute_in_the_order_of_torch_s_code(schedule, orders):
    """On real ranks its sums are bitwise those of this order: test_on_ranks.py."""
    assert computed(plan(schedule, 2, 2, 3)) == orders


def test_a_send_without_its_receive_is_named():
    """Two ranks that both send first: notebook 18."""
    made = plan("Interleaved1F1B", 2, 4, 4)
    made.ranks[1].remove(Action("RECV_F", 1, 0))
    with pytest.raises(WorkbenchError) as told:
        made.check()
    assert str(told.value) == (
        "this schedule would hang: on rank 0 stage 0 sends the activation of microbatch 0, and "
        "nothing on rank 1 answers it")


@pytest.mark.parametrize(("numbers", "told"), [
    (("1F1B", 2, 3, 4), "1F1B cannot deal out 3 stages to 2 ranks"),
    (("GPipe", 2, 4, 4), "GPipe cannot deal out 4 stages to 2 ranks"),
    (("1F1B", 4, 4, 2), "1F1B, 2 microbatches: Number of microbatches (2) must be greater than"),
    (("2F2B", 2, 2, 4), "2F2B, 4 microbatches: Unknown schedule name '2F2B'"),
])
def test_numbers_that_do_not_fit_are_told(numbers, told):
    with pytest.raises(WorkbenchError) as error:
        plan(*numbers)
    assert str(error.value).startswith(told)


def test_each_rank_s_order_is_a_schedule():
    orders = ["0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]
    made = plan(orders, 2, 2, 3)
    made.check()
    assert computed(made) == orders and made.split and len(made.spans()[0]) == 18


@pytest.mark.parametrize(("first", "told"), [
    ("0F0 0B0 0F1 0B1", "Malformed compute schedule, can't schedule sends/recvs"),
    ("0F0 0B0 0F1 0Q1", "Invalid action string: 0Q1"),
])
def test_an_order_that_cannot_be_is_told(first, told):
    orders = [first, "1F0 1F1 1B0 1B1"]
    with pytest.raises(WorkbenchError) as error:
        plan(orders, 2, 2, 2)
    assert str(error.value).startswith(f"{orders}, 2 microbatches: {told}")
