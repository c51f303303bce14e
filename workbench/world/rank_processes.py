"""The processes behind a pool: start them, send to them, receive from them, read their stacks, end them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pickle import dumps, loads
from typing import Any

from workbench.errors import temporary
from workbench.world.bounds import cores
from workbench.world.diagnosis import read_stack, stack_is_whole
from workbench.world.rank_output import Echo

STOP_SECONDS = 5.0
DEAD_CHECK_SECONDS = 0.25
DRAIN_SECONDS = 1.0
STACK_SECONDS = 2.0
KINDS = "ready", "ok", "error", "load", "unsent", "aside", "progress", "launches"
"""What a rank sends."""


class RankProcesses:
    """The processes of all ranks, from start to kill, with a channel to each. A pool that lost one starts new ones.

    They rendezvous through a file in a private folder; their sockets listen on loopback.
    """

    def __init__(self, size: int, backend: str, env: Mapping[str, str], echo: Echo) -> None:
        self.size, self.echo, self.owner = size, echo, os.getpid()
        # mode 0700
        self.folder = Path(temporary(lambda: tempfile.mkdtemp(prefix="workbench-ranks-")))
        self.dismissed = False
        self.tick: Callable[[RankProcesses], None] | None = (
            None  # the running call's, as is `progress`
        )
        self.progress: Callable[[Any], None] | None = None
        self.pids: list[int] = []
        self.registrations: dict[int, bytes] = {}  # what `packed` gave when each rank got it
        self.launches: dict[int, Any] = {}  # of ranks that C++ aborts
        self._question, self._asides = 0, dict[int, Any]()
        self._channels: list[Connection] = []
        self._gone: set[int] = set()
        self._pipes: dict[int, int] = {}  # file descriptor -> rank
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                self._start(rank, backend, rank_env(rank, size, env))
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int, backend: str, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        self._channels.append(Connection(ours.detach()))
        os.set_blocking(read, False)
        self._pipes[read] = rank
        job = {"rank": rank, "size": self.size, "backend": backend, "parent": self.owner, "folder": str(self.folder),
               "store": str(self.folder / "store"), "stacks": str(self._stack_file(rank)), "channel": theirs.fileno()}
        try:
            process = subprocess.Popen(
                # A new process, which imports none of the caller's modules; -P: none of the working folder's either.
                [sys.executable, "-P", "-m", "workbench.world.worker", json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                pass_fds=(theirs.fileno(),),
                env=env,
                start_new_session=True,  # a terminal's or Jupyter's interrupt stays with the parent
            )
        finally:
            theirs.close()
            os.close(write)
        self._processes.append(process)
        self.pids.append(process.pid)

    def send(self, message: tuple[Any, ...], ranks: Iterable[int] | None = None) -> None:
        """Send to these ranks, or to all. `events` reports a rank whose channel is broken."""
        data = dumps(message)
        for rank in range(self.size) if ranks is None else ranks:
            with suppress(OSError):
                self._channels[rank].send_bytes(data)

    def events(self, timeout: float) -> Iterator[tuple[int, str, Any]]:
        """Wait for up to `timeout` seconds, show output, and yield (rank, kind, body) for each message of a rank.

        Two kinds do not come from the rank, and are its last: ("died", exit status or None) and ("stuck", why).
        """
        channels = {
            channel: rank for rank, channel in enumerate(self._channels) if rank not in self._gone
        }
        ready = wait([*channels, *self._pipes], max(0.0, min(timeout, DEAD_CHECK_SECONDS)))
        for fd in [item for item in ready if isinstance(item, int)]:
            self._read(fd)
        for channel, rank in channels.items():
            if channel in ready or self._ended(rank):
                event = self._receive(rank, channel)
                if event[1] == "aside":
                    question, answer = event[2]
                    if question == self._question:  # an earlier one timed out
                        self._asides[rank] = answer
                elif event[1] == "progress":
                    if self.progress is not None:
                        self.progress(event[2])
                elif event[1] == "launches":
                    self.launches[rank] = event[2]
                else:
                    if event[1] in ("died", "stuck"):
                        self._gone.add(rank)
                    yield event

    def bound(self, seconds: float) -> None:
        """Let a rank that stops in the middle of a message block this process for at most `seconds`."""
        bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for channel in self._channels:
            with suppress(OSError), _twin(channel) as socket_:
                socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
                socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def dismiss(self) -> None:
        """End the ranks during a call in another thread. That thread sees them die, and cleans up."""
        self.dismissed = True
        for channel in self._channels:
            with suppress(OSError), _twin(channel) as socket_:
                socket_.shutdown(socket.SHUT_RDWR)

    def ask(self, ranks: Iterable[int], question: str, *args: Any) -> None:
        """Ask these ranks a question, which they answer even during a call; `_aside` in the worker has the list."""
        self._question += 1
        self._asides.clear()
        self.send(
            ("aside", self._question, question, *args),
            [rank for rank in ranks if rank not in self._gone],
        )

    def answers(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """The answers to `ask` that come within `seconds`, by rank."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0 and not self._gone.union(
            self._asides
        ).issuperset(ranks):
            for _ in self.events(left):  # a late answer to a call: dropped
                pass
        return dict(self._asides)

    def _receive(self, rank: int, channel: Connection) -> tuple[int, str, Any]:
        try:
            if channel.poll(0):  # a message sent before it died counts
                kind, body, raw = loads(channel.recv_bytes())
                KINDS.index(kind)
                return rank, kind, channel.recv_bytes() if raw else body
        except BlockingIOError:
            return rank, "stuck", "stopped in the middle of its answer"
        except (EOFError, OSError):
            pass
        except Exception:  # strange bytes unpickle to anything, or raise anything
            return rank, "stuck", ("sent bytes that are no message: something in it writes to a file descriptor that "
                                   "it did not open")
        return rank, "died", self._exit_status(rank)

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self.echo.feed(self._pipes[fd], data)
        else:
            os.close(fd)
            del self._pipes[fd]

    def drain(self) -> None:
        """Show all output so far. The ranks flush theirs before they answer."""
        limit = time.monotonic() + DRAIN_SECONDS  # a rank's thread may never stop writing
        while time.monotonic() < limit and (ready := wait(list(self._pipes), 0)):
            for fd in ready:
                self._read(fd)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Let the ranks exit for up to STOP_SECONDS, then kill the others."""
        if os.getpid() != self.owner:  # a forked child must not end its parent's ranks
            return
        try:
            self.send(("stop",))
            limit = time.monotonic() + STOP_SECONDS
            while len(self._gone) < self.size and (left := limit - time.monotonic()) > 0:
                # read output too: a rank blocked on a full pipe cannot exit
                for _ in self.events(left):
                    pass
            self.drain()
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill every rank with its process group, and remove the folder."""
        if os.getpid() != self.owner:
            return
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for channel in self._channels:
            channel.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ended(self, rank: int) -> bool:
        return self._wait_result(rank) is not None

    def _wait_result(self, rank: int) -> Any:
        # WNOWAIT leaves the zombie in place: no other process group can get its number before it is killed.
        try:
            return os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False

    def _exit_status(self, rank: int) -> int | None:
        """That of a rank that lost its channel; None if it does not end."""
        limit = time.monotonic() + 2.0
        while not self._ended(rank) and time.monotonic() < limit:
            time.sleep(0.005)
        result = self._wait_result(rank)
        if not result:
            return self._processes[rank].returncode
        return int(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
        """The Python stack of each of these ranks, innermost frame first; a rank that gave none in time is left out.

        ask: request the stacks now; otherwise read those that dying ranks have left.
        """
        if ask:
            for rank in ranks:
                if not self._ended(rank):
                    os.kill(self.pids[rank], signal.SIGUSR1)
            limit = time.monotonic() + STACK_SECONDS
            texts: list[str] = []
            while time.monotonic() < limit:  # the rank writes while this reads
                before, texts = texts, [self._stack_text(rank) for rank in ranks]
                if texts == before and all(map(stack_is_whole, texts)):
                    break
                time.sleep(0.05)
        return {rank: read_stack(self._stack_text(rank)) for rank in ranks}

    def _stack_file(self, rank: int) -> Path:
        return self.folder / f"stacks.{rank}"

    def _stack_text(self, rank: int) -> str:
        """What faulthandler has written so far; empty where the file is gone."""
        with suppress(OSError):
            return self._stack_file(rank).read_text("utf-8", "replace")
        return ""


def rank_env(rank: int, size: int, extra: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment: this process's, then its rank, loopback for sockets, its share of threads, and `extra`."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, cores() // size)))
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "WORKBENCH_PROGRESS": "0",  # a rank posts its stages to this process
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    return env | dict(extra)


def _twin(channel: Connection) -> socket.socket:
    """A second file descriptor of a channel's socket, as a socket object."""
    return socket.socket(fileno=os.dup(channel.fileno()))
