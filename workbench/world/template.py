"""Fork ranks from one process that has imported torch: four ranks start in 0.1 s instead of 8 s.

The template imports what `PRELOAD` lists and computes nothing, so it has one thread and a fork loses none. It serves
one owner process, one environment and one version of this package's files, and ends with its owner. Ranks become the
owner's children, as if the owner had started them. Where a fork does not work (see `suits`), ranks are new processes.

The forkserver of `multiprocessing` starts ranks as fast. But it imports the caller's `__main__`, keeps its first
environment, outlives a killed owner that has forked a child, and its ranks' exit status is lost when it dies.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, temporary

START_SECONDS = 120.0
THREADS = "OMP_NUM_THREADS"
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch's own import sets it, and makes the folder
LATE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORKBENCH_", "PYTEST_", CACHE, THREADS)
"""Prefixes of the variables that a rank reads when it runs. All others may be read by an import."""
_MESSAGE = 1 << 16
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER
_LOCK = threading.Lock()
_TEMPLATES: list[Template] = []  # none or one


class Forked:
    """A forked rank, with the part of subprocess.Popen's interface that its pool uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int | None:
        """Its exit status, as subprocess.Popen reports it; TimeoutExpired if it still runs."""
        limit = time.monotonic() + timeout
        while self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another wait has reaped it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a rank", timeout)
            else:
                time.sleep(0.002)
        return self.returncode


class Template:
    """This process's handle on its template."""

    def __init__(self, env: dict[str, str], cache: dict[str, str]) -> None:
        self.owner, self._state = os.getpid(), (env, _files())
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_SECONDS)
        self._stderr = temporary(tempfile.TemporaryFile)  # a pipe that nobody reads would fill
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=self._stderr, pass_fds=(theirs.fileno(),),
                env=env | cache | {THREADS: "1"},  # a fork would lose other threads
                start_new_session=True,  # an interrupt does not reach it
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def serves(self, env: Mapping[str, str]) -> bool:
        """Whether it runs, belongs to this process, has this environment, and no module has changed since its start."""
        mine = self.owner == os.getpid() and self._state == (env, _files())
        return mine and self._process.poll() is None

    def fork(self, request: Mapping[str, Any], fds: list[int]) -> Forked:
        """Start a rank. WorkbenchError if the template has died, with its stderr, or imports for too long."""
        with _adopting():
            answer = b""
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], fds)
                answer = self._channel.recv(_MESSAGE)
            except TimeoutError:
                raise WorkbenchError("the ranks cannot start: the process that imports torch for them has not done so "
                                     f"in {START_SECONDS:g} s") from None
            except ConnectionError:  # the template has died
                pass
        if not answer:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._stderr.seek(0)
            said = self._stderr.read().decode(errors="replace").strip()[-_MESSAGE:]
            raise WorkbenchError("the ranks cannot start: the process that imports torch for them ended with status "
                                 f"{self._process.returncode}" + (f":\n{said}" if said else ""))
        return Forked(int(answer))

    def close(self) -> None:
        """Kill the template. Its ranks keep running."""
        self._channel.close()
        if os.getpid() == self.owner:
            self._process.kill()
            self._process.wait()
        self._stderr.close()


def suits(backend: str, extra: Mapping[str, str]) -> bool:
    """Whether ranks can be forks: a fork cannot use CUDA, and an import may already have read what `extra` sets."""
    import torch

    return backend == "gloo" and not extra and not torch.cuda.is_available()


def fork(job: Mapping[str, Any], env: Mapping[str, str], fds: list[int]) -> Forked:
    """Start a rank that serves `job` (see the worker) in this environment. fds: its channel and its output."""
    late = {name: value for name, value in env.items() if name.startswith(LATE)}
    with _LOCK:
        serving = _serving(env)
        try:
            here = {"folder": os.getcwd(), "cpus": sorted(os.sched_getaffinity(0)), "umask": _umask()}
            return serving.fork({"job": job, "late": late, **here}, fds)
        except BaseException:  # the template may be sending a pid that nobody will wait for
            end()
            raise


def prepare(env: Mapping[str, str]) -> None:
    """Start the template of this environment, if it does not run; it imports while this process goes on."""
    with _LOCK:
        _serving(env)


def _serving(env: Mapping[str, str]) -> Template:
    shared = {name: value for name, value in env.items() if not name.startswith(LATE)}
    if _TEMPLATES and not _TEMPLATES[0].serves(shared):
        end()
    if not _TEMPLATES:
        _TEMPLATES.append(Template(shared, {CACHE: env[CACHE]} if CACHE in env else {}))
    return _TEMPLATES[0]


def _files() -> dict[str, int]:
    """The modification time of each module of this package: a new pool's ranks run the edited ones."""
    package, found = Path(__file__).parent.parent, {}
    for file in package.rglob("*.py"):
        with suppress(FileNotFoundError):  # an editor's dangling lock link
            found[str(file)] = file.stat().st_mtime_ns
    return found


def _umask() -> int:
    """This process's umask; os.umask would change it to read it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("\nUmask:")[1].split()[0], 8)


@atexit.register
def end() -> None:
    """Kill the template, if there is one. The next fork starts another."""
    while _TEMPLATES:
        _TEMPLATES.pop().close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Within this block, orphaned descendants become this process's children, so that it can wait for them."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    if libc.prctl(_ADOPT + 1, ctypes.byref(before)) or libc.prctl(_ADOPT, 1):
        raise WorkbenchError(f"the ranks cannot start: prctl: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.prctl(_ADOPT, before.value)


def _serve(channel: socket.socket) -> None:
    """Import, then fork a rank for each request until the owner has gone."""
    from workbench.torch_api.distributed.preload import PRELOAD

    for name in PRELOAD:
        with suppress(ImportError):  # not in this version of torch
            importlib.import_module(name)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE, 2)
        if not message:
            return
        read, write = os.pipe()
        between = os.fork()
        if not between:  # this process exits at once, so that the rank is an orphan, which the owner adopts
            if not os.fork():
                os.setsid()  # before the owner learns the pid, by which it kills the process group
                os.write(write, str(os.getpid()).encode())
                os.close(read)
                os.close(write)
                channel.close()
                _become_rank(json.loads(message), *fds)
            os._exit(0)
        os.waitpid(between, 0)
        os.close(write)
        channel.send(os.read(read, _MESSAGE))
        for fd in (read, *fds):
            os.close(fd)


def _become_rank(request: dict[str, Any], channel: int, output: int) -> None:
    from workbench.world.worker import serve_job

    status = 1
    try:
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        for name in ("stdout", "stderr"):  # the old ones remember what the descriptors led to
            setattr(sys, name, open(getattr(sys, name).fileno(), "w", closefd=False))  # noqa: SIM115
        os.chdir(request["folder"])
        os.sched_setaffinity(0, request["cpus"])
        os.umask(request["umask"])
        os.environ.update(request["late"])
        _set_threads(os.environ.get(THREADS, ""))
        _reseed()
        serve_job(request["job"] | {"channel": channel})
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for end_of_interpreter in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
            with suppress(BaseException):
                end_of_interpreter()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _set_threads(said: str) -> None:
    """Apply OMP_NUM_THREADS, which OpenMP read in the template: one number, or one for each level of nesting."""
    first = said.split(",")[0].strip()
    if first.isdecimal() and int(first):
        importlib.import_module("torch").set_num_threads(int(first))


def _reseed() -> None:
    """Give this process its own random seeds, and forget which modules the template did not find."""
    random.seed()
    importlib.import_module("torch").seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    importlib.invalidate_caches()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
