"""The processes behind a pool: talking to them, hearing from them, ending them."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pickle import dumps, loads
from typing import Any

from workbench.world.rank_output import Echo

STOP_SECONDS = 5.0
DEAD_CHECK_SECONDS = 0.25
DRAIN_SECONDS = 1.0
STACK_SECONDS = 2.0


class Gang:
    """One generation of ranks, from start to kill, and a channel to each; a pool that lost a rank starts another."""

    def __init__(self, size: int, echo: Echo) -> None:
        self.size, self.echo, self.owner = size, echo, os.getpid()
        self.dismissed = False
        self.pids: list[int] = []
        self.own: dict[int, bytes] = {}  # what each rank had last of what is registered here
        self._question, self._asides = 0, dict[int, Any]()
        self._channels: list[Connection] = []
        self._gone: set[int] = set()
        self._pipes: dict[int, int] = {}  # file descriptor -> rank

    def send(self, message: tuple[Any, ...], ranks: Iterable[int] | None = None) -> None:
        """Send to these ranks, or to all. A rank that cannot take it is found by `events`."""
        data = dumps(message)
        for rank in range(self.size) if ranks is None else ranks:
            with suppress(OSError):
                self._channels[rank].send_bytes(data)

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
                if event[1] == "aside":
                    question, answer = event[2]
                    if question == self._question:  # and not one that nobody waited for
                        self._asides[rank] = answer
                elif event[1] == "output":
                    self.echo.feed(rank, event[2])
                else:
                    if event[1] in ("died", "stuck"):
                        self._gone.add(rank)
                    yield event

    def bound(self, seconds: float) -> None:
        """A rank that is stopped in the middle of a message holds this process no longer than that."""
        for channel in self._channels:
            bound_waits(channel, seconds)

    def dismiss(self) -> None:
        """End the ranks under a call that another thread is in: it sees them die, and cleans up."""
        self.dismissed = True
        for channel in self._channels:
            with suppress(OSError), twin(channel) as socket_:
                socket_.shutdown(socket.SHUT_RDWR)

    def ask(self, ranks: Iterable[int], what: str, *args: Any) -> None:
        """Ask these ranks something aside from the call that they may be in (`_aside` in the worker has the list)."""
        self._question += 1
        self._asides.clear()
        self.send(("aside", self._question, what, *args), [rank for rank in ranks if rank not in self._gone])

    def told(self, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """The answers to `ask` that come within `seconds`, by rank."""
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0 and not self._gone.union(self._asides).issuperset(ranks):
            for _ in self.events(left):  # too late for an answer
                pass
        return dict(self._asides)

    def _receive(self, rank: int, channel: Connection) -> tuple[int, str, Any]:
        try:
            if channel.poll(0):  # what it sent before it died counts
                kind, body, raw = loads(channel.recv_bytes())
                return rank, kind, channel.recv_bytes() if raw else body
        except BlockingIOError:
            return rank, "stuck", "stopped in the middle of its answer"
        except (EOFError, OSError):
            pass
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
        """Echo all that the ranks have written so far. They flush before they answer."""
        limit = time.monotonic() + DRAIN_SECONDS  # a thread of a rank may never stop writing
        while time.monotonic() < limit and (ready := wait(list(self._pipes), 0)):
            for fd in ready:
                self._read(fd)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Let the ranks leave by themselves, for up to STOP_SECONDS; then kill what is left."""
        if os.getpid() != self.owner:  # a forked child must not end its parent's ranks
            return
        try:
            self.send(("stop",))
            limit = time.monotonic() + STOP_SECONDS
            while len(self._gone) < self.size and (left := limit - time.monotonic()) > 0:
                for _ in self.events(left):  # and their output: a rank blocked on a full pipe cannot leave
                    pass
            self.drain()
        finally:
            self.kill()

    def kill(self) -> None:
        """End every rank, now: it ends when it loses its channel."""
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
        """The exit status of a rank that lost its channel; None where it cannot be known."""
        return None

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
        """The Python stack of each of these ranks, innermost frame first; empty where none could be had in time.

        With `ask` the ranks are asked for it now; without, what a dying rank left is read.
        """
        raise NotImplementedError


def bound_waits(channel: Connection, seconds: float) -> None:
    """Neither sending nor receiving waits longer than `seconds` for the other side to go on."""
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with suppress(OSError), twin(channel) as socket_:
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)


def twin(channel: Connection) -> socket.socket:
    """A second handle on the socket behind a channel."""
    return socket.socket(fileno=os.dup(channel.fileno()))
