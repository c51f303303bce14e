"""Where the ranks part, from what each of them launched."""

from dataclasses import replace

from workbench.torch_api.distributed.flight_recorder import Launch
from workbench.world.divergence import first_divergence, user_frame


def launch(number, op="all_reduce", shape=(4,), dtype="float32", group="0", ranks=(0, 1), done=True, axis="tp"):
    return Launch(group, axis, ranks, number, op, (shape,), (dtype,), done, (("cell 333", number, "step"),))


def test_equal_lists_have_none_whatever_the_recorder_has_forgotten():
    assert first_divergence({}) is None
    assert first_divergence({0: [], 1: []}) is None
    assert first_divergence({0: [launch(1), launch(2)], 1: [launch(2)]}) is None
    # a rank whose recorder has forgotten a group has not skipped it
    other = {"group": "b", "axis": "dp"}
    busy = [replace(launch(n, **other), record=5000 + n) for n in (1, 2)]
    assert first_divergence({0: [launch(1), launch(1, **other), launch(2, **other)], 1: busy}) is None
    # inputs of a scatter may differ
    assert first_divergence({r: [launch(1, op="scatter", shape=(r,))] for r in (0, 1)}) is None
    assert first_divergence({r: [launch(1, op="reduce_scatter", shape=(r,))] for r in (0, 1)}) is not None


def test_a_different_operator_shape_or_dtype_is_found_and_both_lines_are_told():
    for other in ({"op": "broadcast"}, {"shape": (2, 2)}, {"dtype": "int32"}):
        found = first_divergence({0: [launch(1), launch(2)], 1: [launch(1), launch(2, **other)]})
        assert found is not None and (found.number, found.missing) == (2, {})
    assert str(found).splitlines() == [
        "The ranks part at collective 2 of group tp (ranks 0, 1):",
        "  rank 0: all_reduce of float32 [4], in step (cell 333, line 2)",
        "  rank 1: all_reduce of int32 [4], in step (cell 333, line 2)",
    ]


def test_a_missing_one_is_told_with_the_last_there_was():
    found = first_divergence({0: [launch(1), launch(2, done=False)], 1: [launch(1)]})
    assert str(found).splitlines()[1:] == [
        "  rank 0: all_reduce of float32 [4], in step (cell 333, line 2)",
        "  rank 1: did not launch it; the last one there is all_reduce of float32 [4], in step (cell 333, line 1)",
    ]
    found = first_divergence({0: [launch(1, done=False)], 1: []})
    assert str(found).splitlines()[-1] == "  rank 1: did not launch it; none was launched there"


def test_a_rank_that_hangs_elsewhere_is_the_consequence():
    # Rank 1 waits for rank 2 in `b`, and so rank 0 waits for rank 1 in `a`.
    a, b = {"group": "a", "ranks": (0, 1), "done": False}, {"group": "b", "ranks": (1, 2), "done": False}
    found = first_divergence({0: [launch(1, **a)], 1: [launch(1, **b)], 2: []})
    assert found is not None and found.ranks == (1, 2) and set(found.missing) == {2}
    # of equals it is the lowest ranks, whoever answered first
    circle = {r: [launch(1, done=False, group=f"{m}", ranks=m)]
              for r, m in enumerate([(0, 2), (0, 1), (2, 3), (1, 3)])}
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        assert first_divergence({rank: circle[rank] for rank in order}).ranks == (0, 2)


def test_unlike_collectives_come_before_a_missing_one():
    others = {"group": "b", "ranks": (0, 1)}
    lists = {0: [launch(1), launch(1, **others)], 1: [launch(1, **others, op="broadcast")]}
    found = first_divergence(lists)
    assert found is not None and set(found.launched) == {0, 1} and not found.missing


def test_the_users_frame_is_kept():
    torchs, users = ("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_reduce"), ("cell 3", 2, "step")
    for stack, kept in (((torchs, users), (users,)), ((torchs,), (torchs,))):
        assert user_frame(replace(launch(1), stack=stack)).stack == kept
