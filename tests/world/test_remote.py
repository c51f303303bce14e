"""A pool whose ranks come from torchrun: two agents on this machine, strangers at the door, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import SOON, wait_until_gone

from workbench.errors import WorkbenchError
from workbench.world import pool as pool_module
from workbench.world.rank_output import Echo
from workbench.world.ranks import RankError, ranks
from workbench.world.remote import Listener, dial, read_address, read_key

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

    def start(listener, key, nodes=2, each=2):
        meet = free_port()
        for node in range(nodes):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--node-rank", str(node),
                       "--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port", str(meet),
                       "-m", "workbench", "worker", "--connect", f"127.0.0.1:{listener}", "--key-file", str(key)]
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
@pytest.mark.nightly
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
        assert time.monotonic() - start < SOON
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
                                 f"-m workbench worker --connect {port}")
    assert listening(port) == []
    assert KEY not in str(caught.value)


def call(port):
    """A connection that says nothing; the pool may not listen yet."""
    for _ in range(500):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.02)
    raise AssertionError("no pool listens")


def test_what_strangers_said_is_in_the_message_and_nothing_is_left(key, monkeypatch):
    monkeypatch.setattr(pool_module, "START_SECONDS", 2.0)
    monkeypatch.setattr("workbench.world.handshakes.HANDSHAKE_SECONDS", 0.5)
    port, met = free_port(), []

    def strangers():
        met.extend(call(port) for _ in range(3))
        met.append(call(port))
        met[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")  # its first bytes as a length: a gigabyte
        with pytest.raises(AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"wrong" * 5)

    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    calling = threading.Thread(target=strangers)
    calling.start()
    with pytest.raises(WorkbenchError) as caught:
        ranks(1, backend="gloo", listen=str(port), key_file=key)
    calling.join()
    for each in met:
        each.close()
    assert str(caught.value).startswith(f"0 of 1 ranks called {port} within 2 s; 1 connection had another key, and 4 "
                                        "connections were closed that did not show it. On each machine: torchrun")
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before


def admitted(listener, size, held, after=0.0):
    """Let `size` workers in while `held` strangers say nothing: (bytes that memory grew by, most threads)."""
    port, most = read_address(listener.address)[1], []
    silent = [call(port) for _ in range(held)]
    silent[0].sendall(b"\x7f\xff\xff\xff" + b"x" * 100_000)  # says that two gigabytes come
    silent[1].sendall(b"\xff\xff\xff\xff\x00\x00\x01" + b"\x00" * 5)  # a terabyte, in the long form

    def worker(rank):
        time.sleep(after)
        most.append(threading.active_count())
        channel, job = dial(listener.address, KEY.encode(), {"rank": rank, "size": size, "pid": 1})
        assert job["rank"] == rank
        channel.close()

    workers = [threading.Thread(target=worker, args=(rank,)) for rank in range(size)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for each in workers:
        each.start()
    processes = listener.admit(size, "gloo", 20.0, Echo("none", size))
    for each in workers:
        each.join(10)
    processes.kill()
    for each in silent:
        each.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, max(most)


def test_forty_silent_connections_do_not_hold_the_door(monkeypatch):
    monkeypatch.setattr("workbench.world.handshakes.HANDSHAKE_SECONDS", 60.0)  # longer than `admitted` waits
    listener = Listener(str(free_port()), KEY.encode())
    grown, _ = admitted(listener, 2, held=40)
    listener.close()
    assert grown < 50e6


def test_a_flood_over_the_bound_costs_the_oldest_their_place(monkeypatch):
    monkeypatch.setattr("workbench.world.handshakes.SPARE", 6)
    monkeypatch.setattr("workbench.world.handshakes.HANDSHAKE_SECONDS", 60.0)
    before = threading.active_count()
    listener = Listener(str(free_port()), KEY.encode())
    _, most = admitted(listener, 2, held=60, after=0.5)
    listener.close()
    assert most <= before + 2 + 2 + 6  # workers, and who is greeted at once
    assert threading.active_count() == before


def test_a_worker_that_lost_its_place_calls_again(key):
    port, answered = free_port(), []
    with socket.create_server(("127.0.0.1", port)) as server:
        calling = threading.Thread(target=lambda: answered.append(dial(f"127.0.0.1:{port}", KEY.encode(), {"rank": 0})))
        calling.start()
        server.accept()[0].close()
        with server.accept()[0] as second:
            channel = Connection(second.detach())
        deliver_challenge(channel, KEY.encode())
        answer_challenge(channel, KEY.encode())
        assert pickle.loads(channel.recv_bytes()) == {"rank": 0}
        channel.send_bytes(pickle.dumps({"size": 1}))
        calling.join(10)
        channel.close()
    assert answered[0][1] == {"size": 1}
    answered[0][0].close()


def test_nothing_is_unpickled_of_one_that_has_not_shown_the_key(monkeypatch):
    monkeypatch.setattr("workbench.world.handshakes.HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr("workbench.world.handshakes.loads", lambda *_: pytest.fail("unpickled"))
    listener = Listener(str(free_port()), KEY.encode())
    stranger = Connection(call(read_address(listener.address)[1]).detach())
    stranger.send_bytes(b"#")
    stranger.send_bytes(pickle.dumps({"rank": 0, "size": 1, "pid": 1}))
    with pytest.raises(WorkbenchError, match="0 of 1 ranks"):
        listener.admit(1, "gloo", 1.0, Echo("none", 1))
    listener.close()
    stranger.close()


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
    ({"backend": "auto"}, "give backend='nccl' or 'gloo'"),
    ({"backend": "gloo", "env": {"A": "1"}}, "the ranks have torchrun's environment: set A where you start torchrun."),
    ({"backend": "gloo", "check": True}, "set TORCH_DISTRIBUTED_DEBUG where you start torchrun."),
])
def test_what_does_not_go_with_listening(arguments, message, key):
    with pytest.raises(WorkbenchError) as caught:
        ranks(2, listen="29600", key_file=key, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("command", [["workbench", "worker"], ["workbench.world.worker"]])  # the second from before
def test_a_worker_that_torchrun_did_not_start_says_so(key, command):
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-m", *command, "--connect", "1", "--key-file", str(key)],
                          capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr == ("workbench: error: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR not set: start this with "
                           "torchrun\n")
