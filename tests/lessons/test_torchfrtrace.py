"""torch's own reader of flight records, over the records of a hang."""

import pytest

from workbench import RankError, WorkbenchError
from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import Failure
from workbench_lessons.l10_run_on_real_ranks.traces import torchfrtrace


def all_reduce(group, axis, ranks, done, op="all_reduce"):
    return Launch(group, axis, ranks, 1, op, ((4,),), ("float32",), done, ())


def hang(launches):
    return RankError("hangs", [Failure(rank, "waiting", "") for rank in launches], launches=launches)


def test_it_names_the_rank_that_is_missing_in_each_group():
    tp, dp = (all_reduce("1", "tp", (0, 1), done=False), all_reduce("2", "dp", (1, 2), done=False))
    lines = torchfrtrace(hang({0: [tp], 1: [dp], 2: []})).splitlines()
    assert [line for line in lines if line.startswith(("group", "missing"))] == [
        "group info: 1:tp", "missing ranks: {1}", "group info: 2:dp", "missing ranks: {2}"]
    assert torchfrtrace(hang({0: [all_reduce("1", "tp", (0, 1), done=True)],
                              1: [all_reduce("1", "tp", (0, 1), done=True)]})) == ""


def test_its_failure_is_told():
    with pytest.raises(WorkbenchError, match=r"torchfrtrace failed: .*Missing dump files from ranks \{1\}"):
        torchfrtrace(hang({0: [all_reduce("1", "tp", (0, 1), done=False)]}))
