"""`RankPool`: calls to running ranks. An error names the failing rank; a call that hangs ends with all stacks."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from workbench.errors import WorkbenchError
from workbench.world.cells import close_stream, next_of, open_stream
from workbench.world.diagnosis import Failure, RankError
from workbench.world.exchange import compared, gather
from workbench.world.pickling import dumps
from workbench.world.rank_output import ECHOES, Echo
from workbench.world.rank_processes import RankProcesses
from workbench.world.registered import packed

START_SECONDS = 120.0
ASK_SECONDS = 1.0
_STREAM_KEYS = itertools.count()
_NOTHING = pickle.dumps((int, (), {}))
Call = tuple[bytes, bytes]
"""Two pickles: what is registered in this process, and the function with its arguments."""


def checked_timeout(seconds: float) -> float:
    """`seconds` as a float. WorkbenchError unless it is a number above 0."""
    if (
        not isinstance(seconds, (int, float))
        or isinstance(seconds, bool)
        or not 0 < seconds < float("inf")
    ):
        raise WorkbenchError(
            f"ranks(timeout={seconds!r}): timeout must be a number of seconds above 0."
        )
    return float(seconds)


class RankPool:
    """`size` ranks with an initialised default process group. Create one with `ranks`."""

    def __init__(
        self, size: int, backend: str, timeout: float, echo: str, env: Mapping[str, str]
    ) -> None:
        self._size, self._backend, self._env = size, backend, dict(env)
        self.timeout, self.echo = timeout, echo
        self._processes: list[RankProcesses] = []  # none or one
        self._closed = False
        self._busy = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._processes)  # also at interpreter exit
        try:
            self._start()
        except BaseException:
            self.close()
            raise

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
        """Time limit of a call in seconds; may be set between calls."""
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = checked_timeout(seconds)

    @property
    def echo(self) -> str:
        """How the ranks' output is shown: "live", "grouped", "rank0" or "none"; may be set between calls."""
        return self._echo

    @echo.setter
    def echo(self, mode: str) -> None:
        if mode not in ECHOES:
            raise WorkbenchError(f"ranks(echo={mode!r}): echo must be one of {', '.join(ECHOES)}.")
        self._echo = mode

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order; empty if none run: after close, or after a failure."""
        return [pid for processes in self._processes for pid in processes.pids]

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._busy.locked()

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Functions, classes and modules defined in a notebook cell are sent by value, tensors by copy: CUDA tensors
        arrive on the host, DTensors are refused (send `to_local()` or `full_tensor()`). A rank imports a module once:
        after editing it, call `restart`. Passes and models that are registered in this process are registered on the
        ranks, too.

        Raises RankError if a rank raises, dies or does not answer in time. The ranks keep running if all of them
        raised the same error and none is in a collective that another did not reach, or if only a result cannot be
        pickled. Otherwise they are killed, and the next call starts new ones. Raises WorkbenchError if the call itself
        cannot be pickled. KeyboardInterrupt kills the ranks.
        """
        return self.run_on(range(self._size), fn, args, kwargs)

    def run_on(
        self,
        some: Sequence[int],
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        tick: Callable[[RankProcesses], None] | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        """Like `run`, on some ranks only: their results, in the order of `some`.

        `tick` is called twice a second, `progress` with each message that `fn` gives to `worker.send_progress`.
        """
        call = self._payload(fn, args, kwargs or {})
        self._claim()
        try:
            return self._exchange(some, call, tick, progress)
        finally:
            self._busy.release()

    def stream(
        self, fn: Callable[..., Iterator[Any]], /, *args: Any, **kwargs: Any
    ) -> Iterator[list[Any]]:
        """Call a generator function on every rank, and yield its values, each as a list in rank order.

        All ranks compute their next value when the caller asks for it, so the caller may leave the loop at any time.
        RankError if some ranks end before others, otherwise as `run`.
        """
        key = next(_STREAM_KEYS)
        self.run(open_stream, key, fn, args, kwargs)
        processes, count = self._processes[0], 0
        try:
            while True:
                items = self.run(next_of, key)
                ended = [rank for rank, (more, _) in enumerate(items) if not more]
                if len(ended) == self._size:
                    return
                if ended:
                    problem = f"its stream ended after {count} values, and other ranks have more"
                    raise RankError(
                        f"rank {ended[0]}: {problem}",
                        [Failure(rank, "error", problem) for rank in ended],
                    )
                yield [value for _, value in items]
                count += 1
        finally:
            if self._processes == [processes]:
                with suppress(WorkbenchError):
                    self.run(close_stream, key)

    def restart(self) -> None:
        """End the ranks and any running call. The next call starts new ranks, which import edited modules."""
        self._end()

    def close(self) -> None:
        """End the ranks: destroy the process group, then kill what is left. May be called twice."""
        self._closed = True
        self._end()
        self._finalizer.detach()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._processes else "idle, restarts with the next call"
        return f"RankPool(size={self._size}, backend={self._backend!r}, {state})"

    def ask(self, some: Sequence[int], question: str, *args: Any) -> dict[int, Any]:
        """Ask some ranks "look" or "complete" (see the worker). Empty during a call, or if no ranks run."""
        if not self._processes or not self._busy.acquire(blocking=False):
            return {}
        try:
            self._processes[0].ask(some, question, *args)
            return self._processes[0].answers(some, ASK_SECONDS)
        finally:
            self._busy.release()

    def refuse_divergence(self) -> None:
        """End the ranks and raise RankError if they ran different collectives without failing: their values are wrong.

        Backends move bytes and do not compare types. Takes about 20 ms.
        """
        self._claim()
        try:
            divergence = None
            if self._processes and compared(self._processes[0], 10, "all")[0] is not None:
                divergence = compared(self._processes[0], 10)[0]
        finally:
            self._busy.release()
        if divergence is not None and not divergence.missing:
            self.restart()
            problem = "ran another collective than the others, and none of them noticed: their values are wrong"
            odd = divergence.odd_one()
            raise RankError(
                f"rank {odd} {problem}", [Failure(odd, "error", problem)], notes=[str(divergence)]
            )

    def _payload(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Call:
        if self._closed:
            raise WorkbenchError("the rank pool is closed: make a new one with ranks(n).")
        registrations = packed()
        try:
            return registrations, dumps((fn, tuple(args), dict(kwargs)))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise WorkbenchError(
                f"the function or an argument cannot be sent to the ranks: {cause}"
            ) from None

    def _claim(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise WorkbenchError(
                "the rank pool is running another call: wait for it, or make a second pool."
            )

    def _exchange(
        self, some: Sequence[int], call: Call, tick: Callable[[RankProcesses], None] | None = None,
        progress: Callable[[Any], None] | None = None,
    ) -> list[Any]:
        if not self._processes:
            self._start()
        path = [entry or os.getcwd() for entry in sys.path]
        (registrations, payload), processes = call, self._processes[0]
        processes.tick, processes.progress = tick, progress
        if any(processes.registrations.get(rank, b"") != registrations for rank in some):
            # by itself: what a registration imports is no part of the call's time
            self._gather(START_SECONDS, ("run", path, registrations, _NOTHING), some)
            processes.registrations |= dict.fromkeys(some, registrations)
        answers = self._gather(self._timeout, ("run", path, b"", payload), some)
        return [_unpickle(rank, answers[rank]) for rank in some]

    def _start(self) -> None:
        echo = Echo(self._echo, self._size)
        self._processes[:] = [RankProcesses(self._size, self._backend, self._env, echo)]
        self._gather(START_SECONDS, None, range(self._size))
        echo.quiet = False

    def _gather(
        self, seconds: float, message: tuple[Any, ...] | None, some: Sequence[int]
    ) -> dict[int, bytes]:
        processes = self._processes[0]
        processes.echo.mode = self._echo
        try:
            return gather(processes, seconds, message, some)
        except BaseException as error:
            if not (isinstance(error, RankError) and error.kept):
                self._processes.clear()
                processes.kill()
            if processes.dismissed:
                raise WorkbenchError(
                    "the ranks were ended during the call, by restart or close."
                ) from None
            raise

    def _end(self) -> None:
        if not self._busy.acquire(blocking=False):
            for processes in self._processes:  # another thread, in a call, notices and cleans up
                processes.dismiss()
            self._busy.acquire()
        try:
            _stop(self._processes)
        finally:
            self._busy.release()


def _unpickle(rank: int, answer: bytes) -> Any:
    try:
        return pickle.loads(answer)
    except Exception as error:
        summary = f"{type(error).__name__}: {error}"
        raise RankError(
            f"rank {rank}: its result cannot be read here: {summary}",
            [Failure(rank, "unsent", summary)],
        ) from None


def _stop(running: list[RankProcesses]) -> None:
    while running:
        running.pop().stop()
