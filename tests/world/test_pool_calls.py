"""Calls in the background, streams, some ranks only, and what can be asked while a call runs."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from processes import SOON, total

from workbench import RankError, WorkbenchError

pytestmark = [pytest.mark.ranks, pytest.mark.compat]


@pytest.fixture
def pool(harmed):
    return harmed


def in_background(pool, fn, *args):
    """A future of `pool.run`, which has the pool when this returns."""
    future = ThreadPoolExecutor(1).submit(pool.run, fn, *args)
    while not pool.busy and not future.done():
        time.sleep(0.01)
    return future


def losses(steps):
    try:
        for step in range(steps):
            yield total(step)
    finally:
        dist.barrier()  # all ranks are here together, however the loop was left


def test_a_call_in_the_background(pool):
    future = in_background(pool, lambda: (time.sleep(0.3), total())[1])
    assert pool.busy and not future.done()
    with pytest.raises(WorkbenchError, match="running another call"):
        pool.run(total)
    assert pool.ask([0], "look") == {}  # the call has the channel
    assert future.result(20) == [2.0, 2.0] and not pool.busy
    assert pool.run(total) == [2.0, 2.0]


def test_a_call_in_the_background_ends_with_a_restart(pool):
    future = in_background(pool, time.sleep, 60)
    time.sleep(0.2)
    pids, start = pool.pids, time.monotonic()
    pool.restart()
    with pytest.raises(WorkbenchError, match="the ranks were ended during the call"):
        future.result(20)
    assert time.monotonic() - start < SOON
    assert pool.run(total) == [2.0, 2.0] and not set(pids) & set(pool.pids)


def test_a_stream_gives_values_as_they_come(pool):
    assert list(pool.stream(losses, 3)) == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]
    seen = list(zip(range(2), pool.stream(losses, 1000), strict=False))  # left early
    assert seen == [(0, [0.0, 0.0]), (1, [2.0, 2.0])] and pool.run(total) == [2.0, 2.0]

    def uneven():
        yield from range(1 if dist.get_rank() else 2)

    with pytest.raises(RankError, match="rank 1: its stream ended after 1 values, and other ranks have more"):
        list(pool.stream(uneven))
    assert pool.run(total) == [2.0, 2.0]


def test_unlike_collectives_that_nobody_notices_are_refused(pool):
    def one_byte_pattern_two_types():
        dist.all_reduce(torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32))

    pool.run(total)
    pool.refuse_divergence()
    pool.run(one_byte_pattern_two_types)
    with pytest.raises(RankError) as caught:
        pool.refuse_divergence()
    assert caught.value.headline == (
        "rank 1 ran another collective than the others, and none of them noticed: their values are wrong")
    assert "rank 0: all_reduce of float32 [2]" in str(caught.value)
    assert "rank 1: all_reduce of int32 [2]" in str(caught.value)
    assert not pool.pids and pool.run(total) == [2.0, 2.0]


def test_a_hang_in_a_captured_graph_shows_its_line(pool):
    def captured():
        from torch.fx.experimental.proxy_tensor import make_fx

        def body(x):
            reduced = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
            return torch.ops._c10d_functional.wait_tensor(reduced)

        return make_fx(body, tracing_mode="fake")(torch.ones(3))

    def hang():
        graph = captured()
        if dist.get_rank() == 0:
            graph(torch.ones(3))

    pool.run(lambda: captured() is None)  # the first capture imports for seconds
    pool.timeout = 2
    with pytest.raises(RankError) as caught:
        pool.run(hang)
    pool.timeout = 30
    told = next(line for line in str(caught.value).splitlines() if "rank 0: all_reduce of float32 [3]" in line)
    assert ": all_reduce = torch.ops._c10d_functional.all_reduce.default(" in told
    assert "rank 1: did not launch it" in str(caught.value)


def test_a_timeout_that_is_none(pool):
    for seconds in (0, float("inf"), True, "5", None):
        with pytest.raises(WorkbenchError, match="timeout must be a number of seconds above 0"):
            pool.timeout = seconds
        assert pool.timeout == 30
