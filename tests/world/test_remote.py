"""A pool whose ranks come from torchrun: two agents on this machine, strangers at the door, and what goes wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import wait_until_gone

from workbench.errors import WorkbenchError
from workbench.world import pool as pool_module
from workbench.world.ranks import RankError, ranks
from workbench.world.remote import dial, read_address, read_key

cloudpickle.register_pickle_by_value(sys.modules[__name__])
KEY = "5e" * 16


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def key(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return file


@pytest.fixture
def agents(tmp_path):
    """Starts two torchrun agents of two ranks each, as two machines would; they end with the test."""
    started = []

    def start(door, key, nodes=2, each=2):
        meet = free_port()
        for node in range(nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node),
                       "--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port", str(meet),
                       "-m", "workbench.world.worker", "--connect", f"127.0.0.1:{door}", "--key-file", str(key)]
            log = (tmp_path / f"agent{node}.log").open("w")
            started.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}))
        return started

    yield start
    for agent in started:
        if agent.poll() is None:
            agent.terminate()
        agent.wait(30)


def total():
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item(), os.environ["LOCAL_RANK"]


def one_raises():
    if dist.get_rank() == 3:
        raise ValueError("boom")
    dist.barrier()


@pytest.mark.ranks
@pytest.mark.slow
def test_two_agents_on_one_machine(key, agents, capsys):
    port = free_port()
    running = agents(port, key)
    with ranks(4, backend="gloo", timeout=30, listen=f"127.0.0.1:{port}", key_file=key, echo="grouped") as pool:
        assert pool.run(total) == [(4.0, "0"), (4.0, "1"), (4.0, "0"), (4.0, "1")]
        pool.run(lambda: print("from", dist.get_rank()))
        assert capsys.readouterr().out.endswith("".join(f"[rank {r}] from {r}\n" for r in range(4)))
        pids = pool.pids
        start = time.monotonic()
        with pytest.raises(RankError) as caught:
            pool.run(one_raises)
        assert time.monotonic() - start < 5
        assert caught.value.headline == "rank 3 failed: ValueError: boom"
        assert "ranks 0, 1, 2: waiting in the collective barrier" in str(caught.value)
        assert wait_until_gone(pids) == []
        assert [value for value, _ in pool.run(total)] == [4.0] * 4  # others have started, and called
        pids = pool.pids
        pool.timeout = 2
        with pytest.raises(RankError, match="gave no answer within 2 s"):
            pool.run(time.sleep, 60)
        assert wait_until_gone(pids) == []
        pool.timeout = 60
        assert [value for value, _ in pool.run(total)] == [4.0] * 4
    assert [agent.wait(30) for agent in running] == [0, 0]


@pytest.mark.ranks
def test_one_agent_and_strangers_at_the_door(key, agents):
    port = free_port()
    refused = []

    def stranger(secret):
        while True:
            try:
                Client(("127.0.0.1", port), authkey=secret)
            except ConnectionRefusedError:
                time.sleep(0.05)
            except Exception as error:
                refused.append(type(error).__name__)
                return

    strangers = [threading.Thread(target=stranger, args=(b"wrong" * 5,)) for _ in range(2)]
    for each in strangers:
        each.start()
    agents(port, key, nodes=1)
    with ranks(2, backend="gloo", listen=str(port), key_file=key, echo="none") as pool:
        assert [value for value, _ in pool.run(total)] == [2.0, 2.0]
        for each in strangers:
            each.join(10)
    assert refused == ["AuthenticationError"] * 2


def listening(port):
    """The addresses that listen on a port, from the kernel's table."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]


def test_it_listens_on_loopback_unless_told_otherwise_and_says_who_did_not_call(key, monkeypatch):
    monkeypatch.setattr(pool_module, "START_SECONDS", 1.0)
    port, seen = free_port(), []
    watcher = threading.Timer(0.5, lambda: seen.extend(listening(port)))
    watcher.start()
    with pytest.raises(WorkbenchError) as caught:
        ranks(2, backend="gloo", listen=str(port), key_file=key)
    watcher.join()
    assert seen == ["0100007F"]
    assert str(caught.value) == (f"0 of 2 ranks called {port} within 1 s. On each machine: torchrun ... "
                                 f"-m workbench.world.worker --connect {port}")
    assert listening(port) == []
    assert KEY not in str(caught.value)


def test_a_stranger_who_says_nothing_does_not_hold_the_door(key, monkeypatch):
    monkeypatch.setattr(pool_module, "START_SECONDS", 2.0)
    monkeypatch.setattr("workbench.world.remote.HANDSHAKE_SECONDS", 0.3)
    port = free_port()
    silent = []
    caller = threading.Timer(0.3, lambda: silent.append(socket.create_connection(("127.0.0.1", port))))
    caller.start()
    start = time.monotonic()
    with pytest.raises(WorkbenchError, match="1 connections were refused, for want of the key"):
        ranks(1, backend="gloo", listen=str(port), key_file=key)
    assert time.monotonic() - start < 4
    caller.join()
    silent[0].close()


def test_another_number_of_ranks_is_refused(key, monkeypatch):
    port = free_port()

    def caller():
        time.sleep(0.3)
        with pytest.raises((EOFError, OSError)):
            dial(f"127.0.0.1:{port}", KEY.encode(), {"rank": 0, "size": 8, "pid": 1})

    calling = threading.Thread(target=caller)
    calling.start()
    with pytest.raises(WorkbenchError, match=r"torchrun started 8 ranks: start 2, or make n 8"):
        ranks(2, backend="gloo", listen=str(port), key_file=key)
    calling.join()


@pytest.mark.parametrize(("text", "mode", "message"), [
    ("short", 0o600, "holds 5 bytes, and a key needs 16 or more"),
    (KEY, 0o644, "can be read by others: chmod 600"),
    (None, 0o600, "cannot be read: No such file or directory"),
])
def test_bad_keys(tmp_path, text, mode, message):
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(WorkbenchError) as caught:
        read_key(file)
    assert message in str(caught.value) and (text is None or text not in str(caught.value).replace(str(file), ""))


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORKBENCH_KEY", KEY)
    assert read_key(None) == KEY.encode()
    monkeypatch.delenv("WORKBENCH_KEY")
    with pytest.raises(WorkbenchError, match="the environment variable WORKBENCH_KEY holds 0 bytes"):
        read_key(None)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:99999", "host:port"])
def test_bad_addresses(address, key):
    with pytest.raises(WorkbenchError, match="expected HOST:PORT"):
        ranks(2, backend="gloo", listen=address, key_file=key)


def test_addresses():
    assert read_address("10.0.0.1:80") == ("10.0.0.1", 80)
    assert read_address("[::1]:80") == ("::1", 80) and read_address("80") == ("127.0.0.1", 80)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"backend": "auto"}, "say backend='nccl' or 'gloo'"),
    ({"backend": "gloo", "env": {"A": "1"}}, "torchrun's environment is the ranks': set A where you start it."),
    ({"backend": "gloo", "check": True}, "set TORCH_DISTRIBUTED_DEBUG where you start it."),
])
def test_what_does_not_go_with_listening(arguments, message, key):
    with pytest.raises(WorkbenchError) as caught:
        ranks(2, listen="29600", key_file=key, **arguments)
    assert message in str(caught.value)


def test_a_worker_that_torchrun_did_not_start_says_so(key):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-m", "workbench.world.worker", "--connect", "1", "--key-file", str(key)],
                          capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr == ("error: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR not set: start this with torchrun\n")
