"""The pool on its good days: results, output, warm calls, clean leaving, and bad arguments."""

import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import SOON, wait_until_gone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from workbench.errors import WorkbenchError
from workbench.world import rank_processes
from workbench.world.rank_output import Echo
from workbench.world.ranks import RankError, RankPool, ranks

pytestmark = pytest.mark.ranks

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.fixture
def pool(pool2):
    return pool2


def test_results_come_in_rank_order_after_a_collective(pool):
    def total(base, *, factor):
        value = torch.tensor([float(base + dist.get_rank())])
        dist.all_reduce(value)
        return dist.get_rank(), os.getpid(), (value * factor).item()

    assert pool.run(total, 10, factor=2) == [(rank, pid, 42.0) for rank, pid in enumerate(pool.pids)]
    # each is a child without input, in a process group of its own, and sees no GPU
    seen = pool.run(lambda: (os.getppid(), os.getpgrp(), os.fstat(0).st_rdev, os.environ["CUDA_VISIBLE_DEVICES"]))
    assert seen == [(os.getpid(), pid, os.stat(os.devnull).st_rdev, "") for pid in pool.pids]


ATEN, MUL, SUM = torch.ops.aten, torch.ops.aten.mul, torch.ops.aten.sum.default


def test_operators_arrive_with_the_function_that_names_them(pool):
    """Pickle knows none of torch.ops, a namespace, an operator and its overload."""

    def doubled(x):
        return SUM(MUL(torch.ops.aten.relu.default(x), 2.0)) + ATEN.sum.default(x), [SUM, MUL.Tensor]

    for value, operators in pool.run(doubled, torch.tensor([1.0, -3.0])):
        assert value == 0.0 and operators == [SUM, MUL.Tensor]


CELL = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        return scale * super().forward(x)
def apply(net, x):
    return net(x), Net(3, 2)
scale = 2.0
"""


def test_names_of_a_cell_arrive_with_the_call_and_come_back(pool):
    space = {"__name__": "__main__"}  # the names of a notebook's cell, whose file does not exist
    exec(compile(CELL, "<cell 7>", "exec"), space)
    net, x = space["Net"](3, 2), torch.ones(4, 3)
    for value, made in pool.run(space["apply"], net, x):
        assert torch.equal(value, net(x))
        assert isinstance(made, space["Net"])


def test_a_view_does_not_drag_its_storage_along_and_tied_parameters_stay_tied(pool):
    def pieces():
        large = torch.arange(1_000_000.0)
        tied = torch.nn.Parameter(large[:4])
        return large[2:5], {"a": tied, "b": tied}, large[:3].clone().requires_grad_() * 2, large.bfloat16().view(2, -1)

    view, tied, grown, whole = pool.run(pieces)[1]
    assert view.tolist() == [2.0, 3.0, 4.0] and view.untyped_storage().nbytes() == 12
    assert tied["a"] is tied["b"] and isinstance(tied["a"], torch.nn.Parameter) and tied["a"].requires_grad
    assert grown.tolist() == [0.0, 2.0, 4.0]
    assert torch.equal(whole, torch.arange(1_000_000.0).bfloat16().view(2, -1))
    whole.add_(1)  # it is its own memory


def test_dtensor_result_is_refused_with_what_to_send(pool):
    def shards():
        return distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])

    with pytest.raises(RankError, match=r"send x.to_local\(\) or x.full_tensor\(\)"):
        pool.run(shards)


def test_every_echo_shows_its_lines_and_keeps_the_last_ones(capsys):
    for mode, shown in (("live", "[rank 1] a\n[rank 0] b\n[rank 1] cd\n[rank 0] e\n"),
                        ("grouped", "[rank 0] b\n[rank 0] e\n[rank 1] a\n[rank 1] cd\n"),
                        ("rank0", "[rank 0] b\n[rank 0] e\n"), ("none", "")):
        echo = Echo(mode, 2)
        echo.feed(0, b"of the start\n")
        echo.quiet = False
        for rank, data in ((1, b"a\nc"), (0, b"10%\rb\ne"), (1, b"d\n")):
            echo.feed(rank, data)
        echo.finish()
        assert (mode, capsys.readouterr().out) == (mode, shown)
        assert [list(tail) for tail in echo.tail] == [["of the start", "b", "e"], ["a", "cd"]]


def test_ranks_that_never_stop_writing_hold_neither_a_call_nor_a_restart(harmed):
    def babble():
        def forever():
            while True:
                os.write(1, b"x" * 60 + b"\n")

        threading.Thread(target=forever, daemon=True).start()

    harmed.run(os.getpid)
    pids, start = harmed.pids, time.monotonic()
    assert harmed.run(babble) == [None, None]
    assert harmed.run(os.getpid) == pids
    harmed.restart()
    assert time.monotonic() - start < SOON
    assert wait_until_gone(pids, 0) == []
    assert harmed.run(os.getpid) == harmed.pids != pids


def listeners(pids):
    """(pid, address) of every listening TCP socket that one of these processes holds, from /proc."""
    table = {}
    for name in ("tcp", "tcp6"):
        for row in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":  # LISTEN
                table[fields[9]] = fields[1].rsplit(":", 1)[0]
    found = []
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inode = os.readlink(fd).removeprefix("socket:[").removesuffix("]")
                if inode in table:
                    found.append((pid, table[inode]))
    return found


def test_nothing_listens_beyond_loopback(pool):
    before = listeners([os.getpid()])
    pool.run(lambda: dist.barrier(dist.new_group([0, 1])))
    in_ranks = listeners(pool.pids)
    assert in_ranks, "gloo listens on loopback: finding nothing means that this test sees nothing"
    assert [pair for pair in in_ranks if pair[1] not in LOOPBACK] == []
    assert listeners([os.getpid()]) == before
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)  # on all interfaces
    assert [address for _, address in listeners([os.getpid()]) if address not in LOOPBACK]
    del store


def test_close_leaves_nothing(private_folder, monkeypatch):
    monkeypatch.setattr(rank_processes, "STOP_SECONDS", 3 * SOON)
    before, fds = dict(os.environ), len(os.listdir("/proc/self/fd"))
    pool = ranks(2, timeout=30, echo="none", env={"COLOUR": "green"})
    pids, folder = pool.pids, next(private_folder.iterdir())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert pool.run(os.getenv, "COLOUR") == ["green", "green"]
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < SOON, "the ranks left by themselves"
    assert wait_until_gone(pids, 0) == [] and pool.pids == []
    assert list(private_folder.iterdir()) == []
    assert dict(os.environ) == before and len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(WorkbenchError, match=r"the rank pool is closed: make a new one with ranks\(n\)\."):
        pool.run(os.getpid)


def test_a_forgotten_pool_ends_with_its_last_reference_and_waits_for_the_threads_of_its_calls(tmp_path):
    def writes_at_its_end(path):
        threading.Thread(target=lambda: (time.sleep(1), path.write_text("written"))).start()

    pool = ranks(1, timeout=30, echo="none")
    pids = pool.pids
    pool.run(writes_at_its_end, tmp_path / "late")
    del pool
    gc.collect()
    assert wait_until_gone(pids, 0) == []
    assert (tmp_path / "late").read_text() == "written"


def test_a_forked_child_does_not_end_its_parents_ranks(pool):
    child = os.fork()
    if not child:
        try:
            pool.restart()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    pids = pool.pids
    assert pool.run(os.getpid) == pids


def with_gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_bad_arguments_get_one_clear_message(private_folder, monkeypatch):
    for arguments, gpus, message in [
        ({"n": 2.0}, 0, "ranks(n=2.0): n must be a whole number, 1 or more."),
        ({"backend": "mpi"}, 0, "ranks(backend='mpi'): backend must be one of auto, gloo, nccl."),
        ({"echo": "loud"}, 0, "ranks(echo='loud'): echo must be one of live, grouped, rank0, none."),
        ({"backend": "nccl"}, 0, "ranks(backend='nccl'): no CUDA GPU can be used here. Use backend='gloo' or 'auto'."),
        ({"n": 8, "backend": "nccl"}, 4, "ranks(n=8, backend='nccl'): 8 ranks need 8 GPUs, and this machine has 4 "
         "GPUs. Use n=4 or fewer, or backend='gloo'."),
    ]:
        with_gpus(monkeypatch, gpus)
        with pytest.raises(WorkbenchError) as caught:
            ranks(**{"n": 2, **arguments})
        assert str(caught.value) == message
    assert list(private_folder.iterdir()) == []


def test_auto_takes_nccl_only_with_a_gpu_a_rank(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(RankPool, "_start", lambda self: None)
    for gpus, n, backend in ((0, 1, "gloo"), (2, 2, "nccl"), (2, 4, "gloo")):
        with_gpus(monkeypatch, gpus)
        assert ranks(n).backend == backend
