"""A pool of real ranks on this machine, for notebooks: one process a rank, kept warm between calls.

    with ranks(4) as pool:
        losses = pool.run(train, recipe)    # `train` may be defined in a notebook cell

A rank that fails is named, a call that hangs ends with every rank's stack, and nothing outlives the parent process.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from workbench.errors import WorkbenchError
from workbench.world.channel import ECHOES, Echo, Gang
from workbench.world.diagnose import (
    Failure,
    RankError,
    cause,
    exit_text,
    note_interrupt,
    ranks_text,
    waiting,
    with_source,
)
from workbench.world.worker import dumps

__all__ = ["RankError", "RankPool", "ranks"]

BACKENDS = ("auto", "gloo", "nccl")
START_SECONDS = 120.0
GRACE_SECONDS = 1.0
"""After the first failure, how long the other ranks may take to say what happened to them."""


class RankPool:
    """`size` ranks with an initialised default process group. Make one with `ranks`."""

    def __init__(self, size: int, backend: str, timeout: float, echo: str, env: Mapping[str, str]) -> None:
        self._size, self._backend, self._timeout, self._env = size, backend, timeout, dict(env)
        self._echo_mode = echo
        self._gang: list[Gang] = []  # none or one
        self._closed = False
        self._busy = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._gang)  # also at interpreter exit
        self._start()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def backend(self) -> str:
        """`gloo` or `nccl`."""
        return self._backend

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self._timeout

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order; empty while none run: closed, or after a failure."""
        return [process.pid for gang in self._gang for process in gang.processes]

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Functions, classes and modules defined in a notebook cell are sent by value, tensors by copy: CUDA tensors
        arrive on the host, DTensors are refused (send `to_local()` or `full_tensor()`). Imported modules are
        loaded once in each rank: after editing one, call `restart`.

        Raises RankError when a rank raises, dies or does not answer in time: then all ranks are killed, and the
        next call starts new ones. A result that cannot be pickled is a RankError too, but the ranks stay. Raises
        WorkbenchError when the call itself cannot be pickled. KeyboardInterrupt kills the ranks.
        """
        if self._closed:
            raise WorkbenchError("the rank pool is closed: make a new one with ranks(n).")
        try:
            payload = dumps((fn, args, kwargs))
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise WorkbenchError(f"the function or an argument cannot be sent to the ranks: {what}") from None
        if not self._busy.acquire(blocking=False):
            raise WorkbenchError("the rank pool is running another call: wait for it, or make a second pool.")
        try:
            if not self._gang:
                self._start()
            path = [entry or os.getcwd() for entry in sys.path]
            answers = self._gather(self._gang[0], self._timeout, ("run", path, payload))
        finally:
            self._busy.release()
        return [_unpickle(rank, answers[rank]) for rank in range(self._size)]

    def restart(self) -> None:
        """End the ranks; the next call starts new ones, which load edited modules afresh."""
        _stop(self._gang)

    def close(self) -> None:
        """End the ranks: the process group is destroyed, then whatever is left is killed. May be called twice."""
        self._closed = True
        _stop(self._gang)
        self._finalizer.detach()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._gang else "idle, restarts with the next call"
        return f"RankPool(size={self._size}, backend={self._backend!r}, {state})"

    def _start(self) -> None:
        # The pool's own time limit must strike first: it shows stacks, the process group's does not.
        group_timeout = max(self._timeout, START_SECONDS) + 60
        echo = Echo(self._echo_mode, self._size)
        gang = Gang(self._size, self._backend, self._env, max(self._timeout, 1.0), group_timeout, echo)
        self._gang[:] = [gang]
        self._gather(gang, START_SECONDS, None)
        echo.quiet = False

    def _gather(self, gang: Gang, seconds: float, message: tuple[Any, ...] | None) -> dict[int, bytes]:
        """Send `message` (None: the ranks are starting) and wait until every rank has answered.

        Anything else ends all ranks and raises: a half-done exchange must not meet the next call.
        """
        answers: dict[int, bytes] = {}
        failures: dict[int, Failure] = {}
        limit = time.monotonic() + seconds
        try:
            if message is not None:
                gang.send(message)
            while len(answers) + len(failures) < self._size and (left := limit - time.monotonic()) > 0:
                for rank, kind, body in gang.events(left):
                    if kind in ("ok", "ready"):
                        answers[rank] = body
                        continue
                    answers.pop(rank, None)
                    failures.setdefault(rank, _failure(gang, rank, kind, body))
                    if kind != "unsent":
                        limit = min(limit, time.monotonic() + GRACE_SECONDS)
            gang.drain()
            gang.echo.finish()
            if len(answers) < self._size:
                self._fail(gang, answers, failures, f"{seconds:g} s", message is None)
        except BaseException as error:
            if not (isinstance(error, RankError) and all(failure.kind == "unsent" for failure in error.failures)):
                self._gang.clear()
                try:
                    if isinstance(error, KeyboardInterrupt):
                        late = [rank for rank in range(self._size) if rank not in answers]
                        note_interrupt(error, _waits(gang, late))
                finally:
                    gang.kill()
            raise
        return answers

    def _fail(
        self, gang: Gang, answers: Mapping[int, bytes], failures: dict[int, Failure], limit: str, starting: bool
    ) -> NoReturn:
        late = [rank for rank in range(self._size) if rank not in answers and rank not in failures]
        timed_out = all(failure.kind in ("waiting", "unsent") for failure in failures.values()) and bool(late)
        everyone = [*failures.values(), *_waits(gang, late)]
        first = cause(everyone)
        notes = ""
        if timed_out:
            state = "did not start" if starting else "gave no answer"
            headline = f"{ranks_text(late)} {state} within {limit}."
            if answers:
                headline += f" ({ranks_text(list(answers))} {'did' if starting else 'had returned'}.)"
        else:
            headline = f"rank {first.rank} {_verb(first.kind, starting)}: {first.summary}"
        shown = {late[0]} if timed_out and starting else {first.rank} if first.kind == "died" else set()
        for rank in shown:
            if gang.echo.tail[rank]:
                notes = "\n".join(["", f"rank {rank}, last output:", *(f"  {line}" for line in gang.echo.tail[rank])])
        raise RankError(headline, everyone, timed_out, notes) from None


def ranks(
    n: int,
    backend: str = "auto",
    timeout: float = 60.0,
    echo: str = "live",
    env: Mapping[str, str] | None = None,
) -> RankPool:
    """Start `n` ranks on this machine and return their pool; use it in a `with`, or call `close()`.

    `backend`: "nccl" (one GPU a rank), "gloo" (CPU), or "auto": nccl if there are enough GPUs. `timeout`: seconds
    that one call may take. `echo`: the ranks' output "live", "grouped" by rank after each call, of "rank0" only,
    or "none". `env`: environment variables for the ranks, on top of this process's. The ranks' OMP_NUM_THREADS is
    the cores divided by `n`, unless it is set.

    Raises WorkbenchError for arguments that cannot work here, RankError when the ranks do not start.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise WorkbenchError(f"ranks(n={n!r}): n must be a whole number, 1 or more.")
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not 0 < timeout < float("inf"):
        raise WorkbenchError(f"ranks(timeout={timeout!r}): timeout must be a number of seconds above 0.")
    for name, value, allowed in (("backend", backend, BACKENDS), ("echo", echo, ECHOES)):
        if value not in allowed:
            raise WorkbenchError(f"ranks({name}={value!r}): {name} must be one of {', '.join(allowed)}.")
    return RankPool(n, _resolve(backend, n), float(timeout), echo, env or {})


def _resolve(backend: str, n: int) -> str:
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        return "nccl" if gpus >= n and torch.distributed.is_nccl_available() else "gloo"
    if backend == "nccl" and not gpus:
        raise WorkbenchError("ranks(backend='nccl'): no CUDA GPU can be used here. Use backend='gloo' or 'auto'.")
    if backend == "nccl" and n > gpus:
        have = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise WorkbenchError(
            f"ranks(n={n}, backend='nccl'): {n} ranks need {n} GPUs, and this machine has {have}. "
            f"Use n={gpus} or fewer, or backend='gloo'."
        )
    return backend


def _waits(gang: Gang, late: Sequence[int]) -> list[Failure]:
    stacks, now = gang.stacks(late), time.monotonic()
    return [waiting(rank, stacks.get(rank, []), now) for rank in late]


def _failure(gang: Gang, rank: int, kind: str, body: Any) -> Failure:
    now = time.monotonic()
    if kind == "died":
        stack = with_source("\n".join(gang.stacks([rank], ask=False).get(rank, [])))
        summary = exit_text(body) if body is not None else "the process closed its channel"
        return Failure(rank, "died", summary, stack, now)
    if kind == "stuck":
        return Failure(rank, "waiting", body, "", now)
    return Failure(rank, kind, body["summary"], with_source(body["traceback"]), now)


def _verb(kind: str, starting: bool) -> str:
    if starting:
        return "did not start"
    return {
        "died": "died",
        "load": "could not load the function or an argument",
        "unsent": "could not send its result",
    }.get(kind, "failed")


def _unpickle(rank: int, answer: bytes) -> Any:
    try:
        return pickle.loads(answer)
    except Exception as error:
        summary = f"{type(error).__name__}: {error}"
        raise RankError(
            f"rank {rank}: its result cannot be read here: {summary}", [Failure(rank, "unsent", summary)]
        ) from None


def _stop(gangs: list[Gang]) -> None:
    while gangs:
        gangs.pop().stop()
