"""Ranks on this machine: start their processes, read their stacks, end them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workbench.errors import temporary
from workbench.world.bounds import cores
from workbench.world.diagnosis import read_stack, stack_is_whole
from workbench.world.rank_output import Echo
from workbench.world.rank_processes import STACK_SECONDS, RankProcesses


class LocalRanks(RankProcesses):
    """Ranks on this machine. They rendezvous through a file in a private folder; their sockets listen on loopback."""

    def __init__(self, size: int, backend: str, env: Mapping[str, str], echo: Echo) -> None:
        super().__init__(size, echo)
        self.folder = Path(temporary(lambda: tempfile.mkdtemp(prefix="workbench-ranks-")))  # mode 0700
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                job = {
                    "rank": rank,
                    "size": size,
                    "backend": backend,
                    "parent": self.owner,
                    "folder": str(self.folder),
                    "store": str(self.folder / "store"),
                    "stacks": str(self._stack_file(rank)),
                }
                self._start(job, rank_env(rank, size, env))
        except BaseException:
            self.kill()
            raise

    def _start(self, job: dict[str, Any], env: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        with theirs:
            self._channels.append(Connection(ours.detach()))
            os.set_blocking(read, False)
            self._pipes[read] = job["rank"]
            try:
                process = _spawn(job, env, theirs.fileno(), write)
            finally:
                os.close(write)
        self._processes.append(process)
        self.pids.append(process.pid)

    def _ended(self, rank: int) -> bool:
        return self._wait_result(rank) is not None

    def _wait_result(self, rank: int) -> Any:
        # WNOWAIT leaves the zombie in place: no other process group can get its number before it is killed.
        try:
            return os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False

    def _last_words(self, rank: int) -> int | None:
        limit = time.monotonic() + 2.0
        while not self._ended(rank) and time.monotonic() < limit:
            time.sleep(0.005)
        result = self._wait_result(rank)
        if not result:
            return self._processes[rank].returncode
        return int(result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
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

    def broken(self) -> str:
        if self.folder.exists():
            return ""
        return f"{self.folder}, through which new process groups find each other, was removed while the ranks ran"

    def _stack_file(self, rank: int) -> Path:
        return self.folder / f"stacks.{rank}"

    def _stack_text(self, rank: int) -> str:
        """What faulthandler has written so far; empty where the file is gone."""
        with suppress(OSError):
            return self._stack_file(rank).read_text("utf-8", "replace")
        return ""

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
        super().kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _spawn(job: Mapping[str, Any], env: Mapping[str, str], channel: int, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # A new process, which imports none of the caller's modules; -P: none of the working folder's either.
        [sys.executable, "-P", "-m", "workbench.world.worker", json.dumps({**job, "channel": channel})],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(channel,),
        env=env,
        start_new_session=True,  # a terminal's or Jupyter's interrupt stays with the parent
    )


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
