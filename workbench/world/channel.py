"""The processes behind a pool: starting them, talking to them, showing their output, ending them."""

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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pickle import dumps, loads
from typing import Any

from workbench.world.diagnose import read_stack

ECHOES = ("live", "grouped", "rank0", "none")
STOP_SECONDS = 5.0
STACK_SECONDS = 1.0
DEAD_CHECK_SECONDS = 0.25
DRAIN_SECONDS = 1.0
TAIL_LINES = 10


class Echo:
    """Shows the ranks' output line by line, each with its rank, and remembers the last lines of each.

    Mode "live": as it comes; "grouped": after the call, in rank order; "rank0": only that rank's, as it comes; "none".
    """

    def __init__(self, mode: str, size: int) -> None:
        self.mode, self.quiet = mode, True
        self._part = [b""] * size
        self._held: list[list[str]] = [[] for _ in range(size)]
        self.tail: list[deque[str]] = [deque(maxlen=TAIL_LINES) for _ in range(size)]

    def feed(self, rank: int, data: bytes) -> None:
        """Take what a rank wrote; whole lines are shown, the rest waits."""
        *lines, self._part[rank] = (self._part[rank] + data).split(b"\n")
        # A progress bar rewrites its line: its last state is what stands.
        self._show(rank, [line.decode("utf-8", "replace").rstrip("\r").rsplit("\r")[-1] for line in lines])

    def finish(self) -> None:
        """End of a call: show unfinished lines and, when grouped, everything."""
        for rank, part in enumerate(self._part):
            if part:
                self.feed(rank, b"\n")
        for held in self._held:
            sys.stdout.write("".join(held))
            held.clear()

    def _show(self, rank: int, lines: Sequence[str]) -> None:
        self.tail[rank].extend(lines)
        if self.quiet or self.mode == "none" or (self.mode == "rank0" and rank != 0):
            return
        text = [f"[rank {rank}] {line}\n" for line in lines]
        if self.mode == "grouped":
            self._held[rank].extend(text)
        elif text:
            sys.stdout.write("".join(text))
            sys.stdout.flush()


class Gang:
    """One generation of rank processes, from start to kill; a pool that lost a rank starts another.

    The ranks meet in a file of `folder` (mode 0700), and their sockets are bound to the loopback interface.
    """

    def __init__(
        self, size: int, backend: str, env: Mapping[str, str], io_timeout: float, group_timeout: float, echo: Echo
    ) -> None:
        self.size, self.echo, self.owner = size, echo, os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="workbench-ranks-"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []
        self._gone: set[int] = set()
        self._pipes: dict[int, int] = {}  # file descriptor -> rank
        try:
            for rank in range(size):
                job = {
                    "rank": rank,
                    "size": size,
                    "backend": backend,
                    "parent": self.owner,
                    "folder": str(self.folder),
                    "stacks": str(self._stack_file(rank)),
                    "group_timeout": group_timeout,
                }
                self._spawn(job, rank_env(rank, size, env), io_timeout)
        except BaseException:
            self.kill()
            raise

    def _spawn(self, job: dict[str, Any], env: dict[str, str], io_timeout: float) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        with theirs:
            job = job | {"channel": theirs.fileno()}
            # A rank that is stopped in the middle of a message must not hold the parent for ever.
            bound = struct.pack("ll", int(io_timeout), int(io_timeout % 1 * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            self._channels.append(Connection(ours.detach()))
            os.set_blocking(read, False)
            self._pipes[read] = job["rank"]
            try:
                process = subprocess.Popen(
                    # A new process that imports nothing of the caller's; -P: no module of the working folder either.
                    [sys.executable, "-P", "-m", "workbench.world.worker", json.dumps(job)],
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    pass_fds=(theirs.fileno(),),
                    env=env,
                    start_new_session=True,  # a terminal's or Jupyter's interrupt stays with the parent
                )
            finally:
                os.close(write)
        self.processes.append(process)

    def send(self, message: tuple[Any, ...]) -> None:
        """Send to every rank. A rank that cannot take it is found by `events`."""
        data = dumps(message)
        for channel in self._channels:
            with suppress(OSError):
                channel.send_bytes(data)

    def events(self, timeout: float) -> Iterator[tuple[int, str, Any]]:
        """Wait for up to `timeout` seconds; yields (rank, kind, body) for what the ranks sent, and echoes output.

        Two kinds are not from the rank, and are the last that is heard of it: ("died", exit status or None) and
        ("stuck", why).
        """
        channels = {channel: rank for rank, channel in enumerate(self._channels) if rank not in self._gone}
        ready = wait([*channels, *self._pipes], max(0.0, min(timeout, DEAD_CHECK_SECONDS)))
        for fd in [item for item in ready if isinstance(item, int)]:
            self._read(fd)
        for channel, rank in channels.items():
            if channel in ready or self._ended(rank):
                event = self._receive(rank, channel)
                if event[1] in ("died", "stuck"):
                    self._gone.add(rank)
                yield event

    def _receive(self, rank: int, channel: Connection) -> tuple[int, str, Any]:
        try:
            if channel.poll(0):  # what it sent before it died counts
                return rank, *loads(channel.recv_bytes())
        except BlockingIOError:
            return rank, "stuck", "stopped in the middle of its answer"
        except (EOFError, OSError):
            pass
        limit = time.monotonic() + 2.0
        while not self._ended(rank) and time.monotonic() < limit:
            time.sleep(0.005)
        return rank, "died", self._status(rank)

    def _ended(self, rank: int) -> bool:
        return self._wait_result(rank) is not None

    def _wait_result(self, rank: int) -> Any:
        # WNOWAIT leaves the zombie in place, so that its process group cannot be another's when it is killed.
        try:
            return os.waitid(os.P_PID, self.processes[rank].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False

    def _status(self, rank: int) -> int | None:
        result = self._wait_result(rank)
        if not result:
            return self.processes[rank].returncode
        return int(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

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
        """Echo all that the ranks have written so far. They flush before they answer."""
        limit = time.monotonic() + DRAIN_SECONDS  # a thread of a rank may never stop writing
        while time.monotonic() < limit and (ready := wait(list(self._pipes), 0)):
            for fd in ready:
                self._read(fd)  # type: ignore[arg-type]

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
        """The Python stack of each of these ranks, innermost frame first; empty where none could be had in time.

        With `ask` the ranks are asked for it now; without, what a dying rank left is read.
        """
        if ask:
            for rank in ranks:
                if not self._ended(rank):
                    self.processes[rank].send_signal(signal.SIGUSR1)
            limit = time.monotonic() + STACK_SECONDS
            sizes: list[int] = []
            while time.monotonic() < limit:
                before, sizes = sizes, [_size(self._stack_file(rank)) for rank in ranks]
                if all(sizes) and sizes == before:
                    break
                time.sleep(0.05)
        found = {}
        for rank in ranks:
            with suppress(OSError):
                found[rank] = read_stack(self._stack_file(rank).read_text("utf-8", "replace"))
        return found

    def _stack_file(self, rank: int) -> Path:
        return self.folder / f"stacks.{rank}"

    def stop(self) -> None:
        """Let the ranks leave by themselves, for up to STOP_SECONDS; then kill what is left."""
        if os.getpid() != self.owner:  # a forked child must not end its parent's ranks
            return
        try:
            self.send(("stop",))
            limit = time.monotonic() + STOP_SECONDS
            while time.monotonic() < limit and not all(map(self._ended, range(self.size))):
                self.drain()  # a rank blocked on a full pipe cannot leave
                time.sleep(0.01)
            self.drain()
        finally:
            self.kill()

    def kill(self) -> None:
        """End every rank and what it started in its process group, now, and remove the folder."""
        if os.getpid() != self.owner:
            return
        for process in self.processes:
            if process.returncode is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for channel in self._channels:
            channel.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def rank_env(rank: int, size: int, extra: Mapping[str, str]) -> dict[str, str]:
    """A rank's environment: this process's, its place, sockets on loopback, its share of threads, then `extra`."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_GRAPH_REGISTER": "0",  # CUDA graphs need it, and NCCL reads it once
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    return env | dict(extra)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
