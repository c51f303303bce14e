"""Ranks on other machines: torchrun starts a keeper for each, which starts the rank, and a new one when it has ended.

The ranks connect to the pool, which listens at an address. Both sides prove that they know the key (HMAC challenges of
`multiprocessing.connection`) before anything is unpickled. Messages are not encrypted: use a private network, or a
tunnel.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from pickle import dumps, loads
from typing import Any, NoReturn

from workbench.errors import WorkbenchError
from workbench.world.diagnosis import read_stack
from workbench.world.handshakes import Handshakes, keep_alive
from workbench.world.rank_output import Echo
from workbench.world.rank_processes import STACK_SECONDS, RankProcesses

KEY = "WORKBENCH_KEY"
DIAL_SECONDS = 120.0
EARLY_SECONDS, EARLY_ENDS = 1.0, 5


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """The shared key, from a file that only its owner can read, or from the environment variable WORKBENCH_KEY.

    WorkbenchError if it is missing, too short or readable by others; the message never shows the key.
    """
    if path is None:
        key, where = os.environ.get(KEY, "").strip().encode(), f"the environment variable {KEY}"
    else:
        file, where = Path(path), f"the key file {path}"
        try:
            if stat.S_IMODE(file.stat().st_mode) & 0o077:
                raise WorkbenchError(f"{where} can be read by others: chmod 600 {path}")
            key = file.read_bytes().strip()
        except OSError as error:
            raise WorkbenchError(f"{where} cannot be read: {error.strerror}") from None
    if len(key) < 16:
        make = "python -c 'import secrets; print(secrets.token_hex(32))'"
        raise WorkbenchError(f"{where} holds {len(key)} bytes, and a key needs 16 or more: make one with {make}, and "
                             f"give every machine the same key, in a file or in {KEY}")
    return key


def read_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `PORT` for loopback. WorkbenchError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise WorkbenchError(f"address {text!r}: expected HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)


class Listener:
    """The listening socket, to which the ranks connect, and new ones after a failure."""

    def __init__(self, address: str, key: bytes) -> None:
        self.address, self._key = address, key
        host, port = read_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise WorkbenchError(f"ranks(listen={address!r}): cannot listen there: {error.strerror}") from None

    def admit(self, size: int, backend: str, seconds: float, echo: Echo) -> RemoteRanks:
        """Wait for `size` ranks. WorkbenchError if torchrun started another number, or too few connect in time."""
        admitted: dict[int, tuple[Connection, dict[str, Any]]] = {}
        limit = time.monotonic() + seconds
        try:
            with Handshakes(self._key, size) as handshakes:
                while len(admitted) < size:
                    if (left := limit - time.monotonic()) <= 0:
                        raise WorkbenchError(
                            f"{len(admitted)} of {size} ranks called {self.address} within {seconds:g} s"
                            f"{handshakes.refused()}. On each machine: torchrun ... -m workbench worker "
                            f"--connect {self.address}")
                    for channel, hello in handshakes.wait(self._socket, left):
                        if (earlier := admitted.get(hello["rank"])) is not None:  # the keeper has started a new one
                            earlier[0].close()
                        admitted[hello["rank"]] = (channel, hello)
                        if hello["size"] != size:
                            raise WorkbenchError(f"ranks(n={size}, listen={self.address!r}): torchrun started "
                                                 f"{hello['size']} ranks: start {size}, or make n {hello['size']}")
        except BaseException:
            for channel, _ in admitted.values():
                channel.close()
            raise
        return RemoteRanks(size, backend, [admitted[rank] for rank in range(size)], echo)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


class RemoteRanks(RankProcesses):
    """Ranks that have connected. They end when they lose their channel, and their keepers start new ones."""

    def __init__(
        self, size: int, backend: str, admitted: Sequence[tuple[Connection, dict[str, Any]]], echo: Echo
    ) -> None:
        super().__init__(size, echo)
        self._channels = [channel for channel, _ in admitted]
        self.pids = [hello["pid"] for _, hello in admitted]
        generation = secrets.token_hex(8)
        for rank, channel in enumerate(self._channels):
            with suppress(OSError):
                channel.send_bytes(dumps({"backend": backend, "size": size, "rank": rank, "generation": generation}))

    def stacks(self, ranks: Sequence[int], ask: bool = True) -> dict[int, list[str]]:
        if not ask:
            return {}
        self.ask(ranks, "stacks")
        return {rank: read_stack(text) for rank, text in self.answers(ranks, STACK_SECONDS).items()}


def keep_a_rank() -> NoReturn:
    """Run this command as a rank, and again whenever it ends, until the pool closes: torchrun sees no failure."""
    def leave(*_: object) -> NoReturn:
        rank.kill()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, leave)
    early = 0
    while True:
        started = time.monotonic()
        rank = subprocess.Popen([sys.executable, "-m", "workbench", *sys.argv[1:], "--rank"], start_new_session=True)
        status = rank.wait()
        if status in (0, 2):  # 0: the pool is closed; 2: it could not be reached
            raise SystemExit(status)
        early = early + 1 if time.monotonic() < started + EARLY_SECONDS else 0
        if early == EARLY_ENDS:
            raise SystemExit(f"error: the rank ended {early} times as soon as it had started: see above")


def dial(address: str, key: bytes, hello: dict[str, Any]) -> tuple[Connection, dict[str, Any]]:
    """In a worker: connect to the pool, authenticate both sides, return channel and job. WorkbenchError if it fails."""
    host, port = read_address(address)
    limit = time.monotonic() + DIAL_SECONDS
    while True:
        connection = None
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.settimeout(None)
            keep_alive(connection)
            channel = Connection(connection.detach())
            # blocks until the pool accepts, which may be at its next call
            answer_challenge(channel, key)
            deliver_challenge(channel, key)
            break
        except AuthenticationError:
            raise WorkbenchError(f"--connect {address}: the pool there has another key") from None
        except (EOFError, OSError) as error:  # among many strangers, the pool may have closed this connection first
            if time.monotonic() > limit:
                if connection is not None:
                    raise
                said = getattr(error, "strerror", None) or error
                raise WorkbenchError(f"--connect {address}: no pool listens there: {said}") from None
            time.sleep(0.5)
    channel.send_bytes(dumps(hello))
    return channel, loads(channel.recv_bytes())


class Output:
    """Sends to the pool what this process and its children write to stdout and stderr."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send, self._reading = send, threading.Lock()
        self._read, write = os.pipe()
        for fd in (1, 2):
            os.dup2(write, fd)
        os.close(write)

    def pump(self) -> None:
        """Send output as it comes, forever: a thread's target."""
        while True:
            select.select([self._read], [], [])
            self.drain()

    def drain(self) -> None:
        """Send all output so far."""
        with self._reading:
            while select.select([self._read], [], [], 0)[0]:
                self._send("output", os.read(self._read, 1 << 16))
