"""Every fault on 2 and 4 ranks: when it is told, what is said first, who is left, and whether the next call works.

The rows are printed as a table at the end of the run.
"""

import ctypes
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import SOON, device, total, wait_until_gone

from workbench.world.ranks import RankError, ranks

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("private_folder")]
TIMEOUT = 2.0


def raises():
    if dist.get_rank() == 1:
        raise ValueError("boom")
    total()


def killed():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total()


def segfault():
    if dist.get_rank() == 1:
        print("about to crash")
        ctypes.string_at(0)
    total()


def out_of_memory():
    if dist.get_rank() == 1:
        if device() == "cuda":
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        bytearray(1 << 30)
    total()


def skipped():
    if dist.get_rank() != 1:
        total()


def other_collective():
    value = torch.ones(4, device=device())
    dist.all_reduce(value) if dist.get_rank() != 1 else dist.broadcast(value, 0)
    return value.sum().item()


def endless():
    while dist.get_rank() == 1:
        pass
    total()


@dataclass
class Fault:
    """`told`: the first line of the report. `at_once`: told when it happens, and not when the time is over."""

    run: Callable[[], Any]
    told: str
    then: str = ""
    at_once: bool = True
    check: bool = False


WAITS = r"waiting in the collective \w+, called from total \(processes.py, line \d+\)"
PARTS = r"the ranks run different collectives: rank \d"
FAULTS = {
    "an exception on one rank, the others wait": Fault(
        raises, "rank 1 failed: ValueError: boom", rf"ranks? 0.*: {WAITS}(.|\n)*Traceback(.|\n)*raise ValueError"),
    "SIGKILL of a rank": Fault(
        killed, r"rank 1 died: the process was killed by SIGKILL \(the system does this when memory runs out\)"),
    "segmentation fault of a rank": Fault(
        segfault, "rank 1 died: the process was killed by SIGSEGV",
        r"rank 1, last output:\n  about to crash(.|\n)*ctypes\.string_at"),
    "out of memory": Fault(out_of_memory, r"rank 1 failed: (MemoryError|.*OutOfMemoryError)"),
    "a collective that one rank skips": Fault(
        skipped, r"ranks? .* gave no answer within 2 s\. \(rank 1 had returned\.\)", "rank 1: did not launch it",
        at_once=False),
    "different collectives": Fault(
        other_collective, r"ranks? .* gave no answer within 2 s\.|rank \d (failed|died)",
        "rank 1: broadcast of float32", at_once=False),
    "different collectives, checked": Fault(other_collective, rf"rank \d failed: RuntimeError: {PARTS}", check=True),
    "endless loop": Fault(  # the odd one out comes first
        endless, r"ranks .* gave no answer within 2 s\.",
        rf"^  rank 1: busy in endless \(test_fault_matrix.py, line \d+\)\n  ranks? 0.*: {WAITS}", at_once=False),
}
GROUPS = [
    pytest.param("gloo", 2, id="2 gloo"),
    pytest.param("gloo", 4, id="4 gloo", marks=pytest.mark.nightly),
    pytest.param("nccl", 4, id="4 nccl", marks=pytest.mark.multi_gpu(4)),
]
DAILY = "segmentation fault of a rank", "different collectives, checked", "endless loop"
"""Each fault ends two ranks, and other tests take the way of those that are left out here."""
NAMES = [name if name in DAILY else pytest.param(name, marks=pytest.mark.nightly) for name in FAULTS]


@pytest.fixture(scope="module")
def pools():
    """One pool for each kind of ranks; faults end its ranks, and it starts others."""
    made = {}

    def pool(backend, n, check=False):
        key = (backend, n, check)
        if key not in made:
            made[key] = ranks(n, backend=backend, timeout=TIMEOUT, echo="none", check=check)
        made[key].timeout = TIMEOUT
        return made[key]

    yield pool
    for each in made.values():
        each.close()


@pytest.mark.parametrize(("backend", "n"), GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_fault(pools, row, private_folder, backend, n, name):
    fault = FAULTS[name]
    pool = pools(backend, n, fault.check)
    if fault.at_once:
        pool.timeout = 3 * SOON
    pool.run(total)
    pids, start = pool.pids, time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fault.run)
    seconds = time.monotonic() - start - (0 if fault.at_once else TIMEOUT)
    left = wait_until_gone(pids, 0)
    assert list(private_folder.iterdir()) == []
    pool.timeout = 60
    works = pool.run(total) == [float(n)] * n
    row(f"{n} {backend}", name, seconds, left, works)
    assert not set(pids) & set(pool.pids)
    first, *rest = str(caught.value).splitlines()
    assert re.match(fault.told, first), first
    assert re.search(fault.then, "\n".join(rest)), "\n".join(rest)
    assert "_listen" not in str(caught.value)  # our own threads are no news
    assert seconds < SOON


@pytest.fixture
def interruptible():
    """A shell's background jobs inherit that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("backend", "n"), GROUPS)
def test_interrupts_in_mid_call_twice_in_a_row(pools, row, backend, n, interruptible):
    pool = pools(backend, n)
    pool.timeout = 60
    for turn in range(2):
        pool.run(total)
        pids = pool.pids
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt) as caught:
            pool.run(endless)
        seconds = time.monotonic() - start - 0.5
        works = pool.run(total) == [float(n)] * n
        left = wait_until_gone(pids, 0)
        row(f"{n} {backend}", f"interrupt in mid-call, number {turn + 1}", seconds, left, works)
        assert "rank 1: busy in endless" in "".join(caught.value.__notes__)
        assert seconds < SOON
