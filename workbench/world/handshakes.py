"""Authenticate the callers of a listening pool in parallel, and close those that do not show the key in time."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pickle import loads
from types import TracebackType
from typing import Any

from workbench.recipe.wording import counted
from workbench.world.rank_processes import bound_waits, twin

HANDSHAKE_SECONDS = 5.0
SPARE = 128
"""Unauthenticated connections allowed at a time, on top of one for each rank."""


class Handshakes:
    """Connections that have yet to show the key, each in its own thread; leaving the `with` ends them all.

    A connection above the limit replaces the oldest. A rank answers within milliseconds, so the oldest one is silent;
    refusing the newest would let silent strangers keep the ranks out. Until a connection has shown the key, it can
    send two messages of at most 256 bytes (`multiprocessing` checks the length before it allocates), and nothing is
    unpickled.
    """

    def __init__(self, key: bytes, size: int) -> None:
        self._key, self._most = key, size + SPARE
        self._ended, self._tell = os.pipe()
        self._open: list[_Handshake] = []  # the oldest first
        self._wrong, self._closed = 0, 0

    def __enter__(self) -> Handshakes:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        while self._open:
            self._close_oldest()
        os.close(self._ended)
        os.close(self._tell)

    def wait(self, listener: socket.socket, seconds: float) -> list[tuple[Connection, Any]]:
        """Accept and authenticate for up to `seconds`: (channel, hello) of those that have just shown the key."""
        now = time.monotonic()
        while self._open and self._open[0].since + HANDSHAKE_SECONDS < now:
            self._close_oldest()
        if self._open:
            seconds = min(seconds, self._open[0].since + HANDSHAKE_SECONDS - now)
        ready = wait([listener, self._ended], max(0.0, seconds))
        if listener in ready:
            if len(self._open) >= self._most:
                self._close_oldest()
            with suppress(OSError):  # it has hung up
                self._open.append(_Handshake(listener.accept()[0], self._key, self._tell))
        if self._ended not in ready:
            return []
        os.read(self._ended, 1 << 16)
        done = [each for each in self._open if each.done]
        self._open = [each for each in self._open if not each.done]
        for each in done:
            each.end()
            self._count(each)
        return [(each.channel, each.hello) for each in done if each.hello is not None]

    def refused(self) -> str:
        """The error message's part on refused connections; "" if there were none."""
        wrong = f"{counted(self._wrong, 'connection')} had another key" if self._wrong else ""
        count = self._closed + len(self._open)
        were = "was" if count == 1 else "were"
        closed = f"{counted(count, 'connection')} {were} closed that did not show it" if count else ""
        if closed and not wrong:
            closed = closed[:-2] + "the key"
        return "; " + ", and ".join(filter(None, (wrong, closed))) if wrong or closed else ""

    def _close_oldest(self) -> None:
        oldest = self._open.pop(0)
        oldest.hang_up()
        oldest.end()
        oldest.hello = None
        oldest.channel.close()
        self._count(oldest)

    def _count(self, ended: _Handshake) -> None:
        self._wrong += ended.wrong_key
        self._closed += ended.hello is None and not ended.wrong_key


class _Handshake(threading.Thread):
    """Authenticates one connection in both directions, reads its hello, and then writes a byte to `tell`.

    hello: {"rank", "size", "pid"}, of a rank; None from anything else.
    """

    def __init__(self, accepted: socket.socket, key: bytes, tell: int) -> None:
        super().__init__(daemon=True, name="handshake")
        self.since = time.monotonic()
        self.hello: Any = None
        self.wrong_key = self.done = False
        self._key, self._tell = key, tell
        keep_alive(accepted)
        self.channel = Connection(accepted.detach())
        bound_waits(self.channel, HANDSHAKE_SECONDS)
        self._twin = twin(self.channel)
        self.start()

    def run(self) -> None:
        try:
            deliver_challenge(self.channel, self._key)
            answer_challenge(self.channel, self._key)
            hello = loads(self.channel.recv_bytes())
            if all(type(hello[name]) is int for name in ("pid", "size", "rank")) and 0 <= hello["rank"] < hello["size"]:
                self.hello = hello
        except AuthenticationError:
            self.wrong_key = True
        except Exception:  # a stranger: silent, gone, or another protocol
            pass
        if self.hello is None:
            self.channel.close()
        self.done = True
        os.write(self._tell, b".")

    def hang_up(self) -> None:
        """Stop the thread's wait for the other side."""
        with suppress(OSError):
            self._twin.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Join the thread, which is about to end."""
        self.join()
        self._twin.close()


def keep_alive(connection: socket.socket) -> None:
    """Notice a vanished machine within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
