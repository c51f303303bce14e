"""The pool on its bad days. Every fault names its rank, ends all ranks, and the next call works."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from processes import SOON, alive, total, wait_until_gone

from workbench import RankError, WorkbenchError, ranks
from workbench.torch_api.distributed import flight_recorder
from workbench.world import exchange
from workbench.world import pool as pool_module
from workbench.world.diagnosis import Failure, cause, exit_text, read_stack, stack_is_whole, where

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("private_folder")]


@pytest.fixture
def pool(harmed):
    return harmed


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr(exchange, "GRACE_SECONDS", 0.3)


def fails(pool, fn, *args, timeout=30):
    """Run `fn`, which must fail; check that no rank is left and that the next call works. Returns (error, seconds)."""
    pool.run(total)
    pids, start = pool.pids, time.monotonic()
    pool.timeout = timeout
    with pytest.raises(RankError) as caught:
        pool.run(fn, *args)
    seconds = time.monotonic() - start
    pool.timeout = 30
    assert wait_until_gone(pids, 0) == []
    assert pool.run(total) == [2.0, 2.0]
    assert not set(pids) & set(pool.pids)
    return caught.value, seconds


def test_the_same_error_after_unlike_collectives_ends_the_ranks(pool):
    def one_goes_first():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        raise KeyError("missing")

    error, _ = fails(pool, one_goes_first)
    assert error.headline.endswith("failed: KeyError: 'missing'") and not error.kept


def test_a_collective_that_nobody_reads_on_one_rank_is_named_though_cpp_aborts_the_other(pool):
    def leaves_one_unread():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(400_000), async_op=True)
        total()

    error, _ = fails(pool, leaves_one_unread)
    assert error.headline == (
        "rank 1 launched another collective than rank 0, and the backend ended rank 0 for it: launch the same "
        "collectives on all ranks, in the same order."
    )
    text = str(error)
    assert "  rank 0: the process was killed by SIGABRT" in text
    parts = r"The ranks part at collective \d+ of group default_pg \(ranks 0, 1\):\n  rank 0: all_reduce of"
    assert re.search(parts, text)
    assert "  rank 1: all_reduce of float32 [400000], in leaves_one_unread (test_ranks_faults.py, line" in text
    assert "in total" in text and "in report" not in text  # where rank 0 was, and not what told the pool


def test_a_rank_that_died_between_two_calls(pool, short_grace):
    pool.run(total)
    os.kill(pool.pids[1], signal.SIGTERM)
    time.sleep(0.1)
    with pytest.raises(RankError, match="rank 1 died: the process was killed by SIGTERM"):
        pool.run(os.getpid)
    assert pool.run(total) == [2.0, 2.0]


def test_a_rank_that_dies_after_it_answered_is_noticed(pool, short_grace):
    def answers_then_dies():
        if dist.get_rank() == 1:
            threading.Timer(0.3, os._exit, (9,)).start()
            return
        time.sleep(20)

    error, seconds = fails(pool, answers_then_dies)
    assert error.headline == "rank 1 died: the process exited with code 9" and seconds < SOON


@pytest.mark.nightly
def test_what_a_call_leaves_running_ends_with_its_rank():
    """The thread keeps the rank from leaving by itself."""
    def leaves():
        threading.Thread(target=time.sleep, args=(60,)).start()
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        forked.start()
        return os.getpid(), forked.pid, subprocess.Popen(["sleep", "60"]).pid

    with ranks(1, backend="gloo") as alone:
        (left,) = alone.run(leaves)
        began = time.monotonic()
    assert time.monotonic() - began < 30 and wait_until_gone(left) == []


@pytest.mark.nightly
def test_a_stopped_rank_ends_too_even_with_a_large_argument(pool):
    pool.run(total)
    pids = pool.pids
    os.kill(pids[0], signal.SIGSTOP)
    start, pool.timeout = time.monotonic(), 1
    with pytest.raises(RankError, match=r"ranks 0, 1 gave no answer within 1 s\.") as caught:
        pool.run(len, bytes(50_000_000))
    assert str(caught.value).splitlines()[1:3] == [
        "  rank 0: no answer, and no stack could be had",
        "  rank 1: waiting for the call",
    ]
    assert time.monotonic() - start < SOON
    assert wait_until_gone(pids, 0) == []
    pool.timeout = 30
    assert pool.run(total) == [2.0, 2.0]


def hangs_and_cannot_tell_on_rank_0():
    if dist.get_rank() == 0:
        flight_recorder.launches = None
        dist.barrier()


def test_a_rank_that_cannot_tell_what_it_launched_is_not_told_to_have_launched_nothing(pool):
    error, _ = fails(pool, hangs_and_cannot_tell_on_rank_0, timeout=1)
    assert "what rank 0 launched is not known: no answer" in str(error)
    assert 0 not in error.launches and "The ranks part" not in str(error)


class Bad:
    def __reduce__(self):
        return int, ("not a number",)


def a_lock_on_rank_1():
    return threading.Lock() if dist.get_rank() == 1 else 0


def test_what_cannot_be_pickled_is_told_and_the_next_call_works(pool):
    for call, said, kept in (
            ((a_lock_on_rank_1,), "rank 1 could not send its result: TypeError: cannot pickle '_thread.lock'", True),
            ((Bad,), "rank 0: its result cannot be read here: ValueError: invalid literal", True),
            ((len, threading.Lock()), "the function or an argument cannot be sent to the ranks: TypeError", True),
            ((len, Bad()), "rank 0 could not load the function or an argument: ValueError: invalid literal", False)):
        pool.run(total)
        pids = pool.pids
        with pytest.raises(WorkbenchError, match=f"^{said}"):
            pool.run(*call)
        assert pool.run(total) == [2.0, 2.0] and (pool.pids == pids) is kept, said


def test_a_start_that_takes_too_long_ends(monkeypatch):
    monkeypatch.setattr(pool_module, "START_SECONDS", 0.05)
    with pytest.raises(RankError, match=r"ranks 0, 1 did not start within 0.05 s\."):
        ranks(2, backend="gloo")


def test_an_interrupt_between_the_starts_of_two_ranks_leaves_none(private_folder, monkeypatch):
    start, processes = subprocess.Popen, []

    def once(*args, **kwargs):
        if processes:
            raise KeyboardInterrupt
        processes.append(start(*args, **kwargs))
        return processes[0]

    monkeypatch.setattr(subprocess, "Popen", once)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ranks(2, backend="gloo", echo="none")
    assert time.monotonic() - began < SOON and processes[0].returncode == -signal.SIGKILL
    assert list(private_folder.iterdir()) == []


def test_a_start_that_fails_shows_why(private_folder):
    with pytest.raises(RankError) as caught:
        ranks(2, backend="gloo", env={"GLOO_SOCKET_IFNAME": "nowhere0"})
    assert caught.value.headline.startswith("rank ") and " did not start: " in caught.value.headline
    assert "nowhere0" in str(caught.value)
    assert list(private_folder.iterdir()) == []

    (private_folder / "cloudpickle.py").write_text("import os\nos.write(1, b'too early')\nos._exit(6)")
    with pytest.raises(RankError) as caught:
        ranks(1, backend="gloo", env={"PYTHONPATH": os.pathsep.join([str(private_folder), *sys.path])})
    assert str(caught.value) == (
        "rank 0 did not start: the process exited with code 6\n\nrank 0, last output:\n  too early"
    )


PARENT = """
from workbench.world.ranks import ranks
pool = ranks(2, backend="gloo", timeout=60)
def endless():
    import subprocess
    print("child", subprocess.Popen(["sleep", "300"]).pid, flush=True)
    while True:
        pass
print("pids", *pool.pids, flush=True)
pool.run(endless)
"""


@pytest.mark.nightly
def test_kill_9_of_the_parent_leaves_no_orphan_and_no_folder(private_folder):
    folder = {"TMPDIR": str(private_folder), "TORCHINDUCTOR_CACHE_DIR": f"{private_folder}-torch"}  # torch makes it
    environment = {**os.environ, **folder, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()[1:]]
    pids.append(int(parent.stdout.readline().split()[-1]))
    assert len(pids) == 3 and all(map(alive, pids))
    parent.kill()
    parent.communicate()
    assert wait_until_gone(pids) == [] and list(private_folder.iterdir()) == []


def test_order_of_causes():
    waits = Failure(0, "waiting", "busy", when=0.0)
    broken = Failure(1, "error", "RuntimeError: [gloo/transport] Connection closed by peer", when=1.0)
    raised = Failure(2, "error", "ValueError: boom", when=2.0)
    died = Failure(3, "died", "the process was killed by SIGABRT", when=3.0)
    assert cause([waits, broken, raised, died]) is raised
    assert [f.rank for f in RankError("x", [waits, died, broken, raised]).failures] == [2, 3, 1, 0]
    assert exit_text(-40) == "the process was killed by signal 40"


def test_stack_of_the_main_thread_is_chosen_once_it_is_whole():
    text = (
        'Thread 0x01 (most recent call first):\n  File "/x/workbench/world/worker.py", line 9 in listen\n\n'
        'Current thread 0x03 (most recent call first):\n  File "/x/cell.py", line 4 in f\n'
        '  File "/x/workbench/world/worker.py", line 70 in _call\n  File "<frozen runpy>", line 8 in _run\n'
    )
    assert read_stack(text) == ['  File "/x/cell.py", line 4 in f']
    assert where(read_stack(text)) == "busy in f (cell.py, line 4)" and where([]).startswith("no answer, and no stack")
    written = text.index("  File \"/x/workbench/world/worker.py\", line 70")
    assert stack_is_whole(text)
    assert not any(stack_is_whole(text[:end]) for end in range(text.index("in listen") + 9, written))  # still written
    assert stack_is_whole('Current thread 0x03 (most recent call first):\n  File "/x/cell.py", line 4 in f\n  ...\n')
