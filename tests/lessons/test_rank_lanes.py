"""Lanes of ranks: what each left, where it waits, and what it did not reach; from records made by hand."""

from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.diagnosis import Failure, RankError
from workbench_lessons.l10_run_on_real_ranks.pictures import awaited, lanes, waits

TP, DP = ("3", "tp", (0, 1)), ("5", "dp", (0, 2))


def launch(number: int, op: str = "all_reduce", *, of: tuple = ("0", "", (0, 1, 2)), done: bool = True,
           line: int = 7) -> Launch:
    group, axis, ranks = of
    return Launch(group, axis, ranks, number, op, ((4,),), ("float32",), done, (("cell 3", line, "step"),))


def failed(launches: dict, **kinds: str) -> RankError:
    failures = [Failure(int(rank[1:]), "waiting" if text == "waits" else "error", text) for rank, text in kinds.items()]
    return RankError("hangs", failures, launches=launches)


def test_a_rank_that_raised_has_a_frame_where_the_others_wait():
    waits = [launch(1), launch(2, done=False, line=9)]
    error = failed({0: waits, 1: [launch(1)], 2: waits}, r0="waits", r1="ValueError: a bad batch", r2="waits")
    assert lanes(error).text.splitlines() == [
        "where each rank stands",
        "rank 0: all_reduce, line 7; waits in all_reduce, line 9",
        "rank 1: all_reduce, line 7; ended without all_reduce, line 9; ValueError: a bad batch",
        "rank 2: all_reduce, line 7; waits in all_reduce, line 9"]


def test_each_link_of_a_chain_is_found_over_several_groups():
    launches = {0: [launch(1, of=TP, done=False)], 1: [], 2: [launch(1, of=DP, done=False)]}
    assert {rank: [each.axis for each in found] for rank, found in awaited(launches).items()} == {1: ["tp"], 0: ["dp"]}
    text = lanes(failed(launches, r0="waits", r2="waits")).text
    assert "rank 0: waits in all_reduce over tp {0, 1}; did not reach all_reduce over dp {0, 2}" in text
    assert "rank 1: ended without all_reduce over tp {0, 1}; returned" in text


def test_stacks_alone_tell_who_waits_and_who_returned():
    launches = {0: [launch(1, of=TP, done=False)], 1: [], 2: [launch(1, of=DP, done=False)]}
    assert waits(failed(launches, r0="waits", r2="waits")).splitlines() == [
        "rank 0 waits in all_reduce over tp {0, 1}",
        "rank 2 waits in all_reduce over dp {0, 2}", "ranks 1 have returned"]


def test_a_lane_goes_on_in_the_given_order():
    launches = {0: [launch(1, of=TP, done=False)], 1: [launch(1, of=("5", "dp", (1, 2)), done=False)], 2: []}
    error = failed(launches, r0="waits", r1="waits", r2="ValueError: bad")
    ordered = lanes(error, {0: ["tp", "dp"], 1: ["dp", "dp", "tp"], 2: ["dp"]}).text.splitlines()[1:]
    assert ordered == [
        "rank 0: waits in all_reduce over tp {0, 1}; later all_reduce over dp",
        "rank 1: waits in all_reduce over dp {1, 2}; later all_reduce over dp; did not reach all_reduce over tp {0, 1}",
        "rank 2: ended without all_reduce over dp {1, 2}; ValueError: bad"]
