"""The processes behind a pool: send to them, receive from them, end them."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pickle import dumps, loads
from typing import Any

from workbench.world.rank_output import Echo

STOP_SECONDS = 5.0
DEAD_CHECK_SECONDS = 0.25
DRAIN_SECONDS = 1.0
STACK_SECONDS = 2.0
KINDS = "ready", "ok", "error", "load", "unsent", "aside", "progress"
"""What a rank sends."""


class RankProcesses:
    """The processes of all ranks, from start to kill, with a channel to each. A pool that lost one starts new ones."""

    def __init__(self, size: int, echo: Echo) -> None:
        self.size, self.echo, self.owner = size, echo, os.getpid()
        self.dismissed = False
        self.tick: Callable[[RankProcesses], None] | None = None  # the running call's, as is `progress`
        self.progress: Callable[[Any], None] | None = None
        self.pids: list[int] = []
        self.own: dict[int, bytes] = {}  # what `registered.packed` gave when each rank last got it
        self._question, self._asides = 0, dict[int, Any]()
        self._channels: list[Connection] = []
        self._gone: set[int] = set()
        self._pipes: dict[int, int] = {}  # file descriptor -> rank

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
        channels = {channel: rank for rank, channel in enumerate(self._channels) if rank not in self._gone}
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
                else:
                    if event[1] in ("died", "stuck"):
                        self._gone.add(rank)
                    yield event

    def bound(self, seconds: float) -> None:
        """Let a rank that stops in the middle of a message block this process for at most `seconds`."""
        for channel in self._channels:
            bound_waits(channel, seconds)

    def dismiss(self) -> None:
        """End the ranks during a call in another thread. That thread sees them die, and cleans up."""
        self.dismissed = True
        for channel in self._channels:
            with suppress(OSError), twin(channel) as socket_:
                socket_.shutdown(socket.SHUT_RDWR)

    def ask(self, ranks: Iterable[int], what: str, *args: Any) -> None:
        """Ask these ranks a question, which they answer even during a call; `_aside` in the worker has the list."""
        self._question += 1
        self._asides.clear()
        self.send(("aside", self._question, what, *args), [rank for rank in ranks if rank not in self._gone])

    def answers(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """The answers to `ask` that come within `seconds`, by rank."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0 and not self._gone.union(self._asides).issuperset(ranks):
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
        return rank, "died", self._last_words(rank)

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
                for _ in self.events(left):  # read output too: a rank blocked on a full pipe cannot exit
                    pass
            self.drain()
        finally:
            self.kill()

    def kill(self) -> None:
        """Close the channels: a rank ends when it loses its channel."""
        if os.getpid() != self.owner:
            return
        for channel in self._channels:
            channel.close()
        for fd in self._pipes:
            os.close(fd)
        self._pipes.clear()

    def _ended(self, rank: int) -> bool:
        """Whether the rank is known to have ended."""
        return rank in self._gone

    def _last_words(self, rank: int) -> int | None:
        """The exit status of a rank that lost its channel; None if unknown."""
        return None

    def broken(self) -> str:
        """What the ranks have lost that their collectives need; "" if nothing."""
        return ""

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
        """The Python stack of each of these ranks, innermost frame first; a rank that gave none in time is left out.

        ask: request the stacks now; otherwise read those that dying ranks have left.
        """
        raise NotImplementedError


def bound_waits(channel: Connection, seconds: float) -> None:
    """Let a send or a receive wait for the other side at most `seconds`."""
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with suppress(OSError), twin(channel) as socket_:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)


def twin(channel: Connection) -> socket.socket:
    """A second file descriptor of a channel's socket, as a socket object."""
    return socket.socket(fileno=os.dup(channel.fileno()))
