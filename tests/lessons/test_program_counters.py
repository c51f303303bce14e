"""The states of four ranks, whose deadlocks are recorded by hand; lesson 10's notebook records them on real ranks."""

from itertools import product

import pytest
from all_reduces import all_reduces

from workbench import RankError, WorkbenchError
from workbench.notebook.show import outputs
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import Failure
from workbench_lessons.l10_run_on_real_ranks.program_counters import ProgramCounters

MESH = {"dp": 2, "tp": 2}
CIRCLE = ["0: dp", "1: tp", "2: tp", "3: dp"]
GROUPS = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}


def by_hand(order):
    """What ranks leave that hang in the first all-reduce of this order."""
    launches = {}
    for rank, (axis, _) in order.items():
        members = next(group for group in GROUPS[axis] if rank in group)
        launches[rank] = [Launch(axis, axis, members, 1, "all_reduce", ((4,),), ("float32",), False, ())]
    return RankError("hangs", [Failure(rank, "waiting", "waits") for rank in order], launches=launches)


@pytest.fixture(scope="module")
def made():
    return ProgramCounters(MESH, by_hand)


@pytest.fixture
def counters(made):
    made.launched = []
    return made


def test_two_of_sixteen_orders_hang_and_the_others_run_on_real_ranks(counters, pool4):
    either = [("dp", "tp"), ("tp", "dp")]
    stuck = {tuple(axis for (axis, _) in order) for order in product(either, repeat=4)
             if tuple((first,) for (first, _) in order) in counters.reports}
    assert stuck == {("dp", "tp", "tp", "dp"), ("tp", "dp", "dp", "tp")}
    order = {rank: [axis, *({*MESH} - {axis})] for rank, axis in enumerate(("dp", "tp", "tp", "tp"))}
    assert pool4.run(all_reduces, order) == [None] * 4


def test_a_rank_waits_until_its_group_is_there(counters):
    free = ["0: tp", "1: tp", "0: dp", "2: dp", "2: tp", "1: dp", "3: dp", "3: tp"]
    for launched, figures in ((CIRCLE[:3], [3, 3, 0, 0]), (CIRCLE, [4, 4, 0, 1]), (free, [8, 0, 4, 0])):
        counters.launched = launched
        assert list(counters.figures.values()) == figures
    assert list(counters.figures) == ["launches", "ranks that wait", "ranks that returned", "deadlock"]


def test_a_launch_that_cannot_be_is_told_so(counters):
    for clicks, said in (
            (["0: dp", "0: tp"], "rank 0 waits in its all-reduce over dp: it cannot launch another one"),
            (["0: dp", "2: dp", "0: dp"], "rank 0 has launched its all-reduce over dp already"),
            (["dp"], "'dp' is no launch: write 'RANK: AXIS', with a rank from 0 to 3 and one of dp, tp")):
        counters.launched = clicks
        assert counters.message == said and counters.figures == {}
    counters.launched = []
    assert counters.message == "" and counters.figures["launches"] == 0


def test_a_record_of_something_else_is_refused():
    with pytest.raises(WorkbenchError, match=r"should wait in an all-reduce, and in .* no rank does: record"):
        ProgramCounters(MESH, lambda order: None)
    with pytest.raises(WorkbenchError, match="the view takes a mesh of two axes and at most 4 ranks"):
        ProgramCounters({"dp": 2, "tp": 4}, lambda order: None)


def test_show_has_a_picture_of_the_deadlock_beside_the_view(counters):
    assert counters.error is None
    assert "waits" not in repr(outputs(counters)[0])
    counters.launched = CIRCLE
    assert counters.error is counters.reports[counters.rules.after(CIRCLE)]
    picture, shown, _ = outputs(counters)
    assert "rank 0: waits in all_reduce over dp" in repr(picture) and shown is counters
