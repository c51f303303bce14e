"""Ranks on other machines: torchrun starts a keeper for each, which starts the rank, and another when that has ended.

The ranks call the pool, which listens where it is told to.
Both sides prove that they know the key (HMAC challenges of `multiprocessing.connection`) before anything is
unpickled. What is sent is not encrypted: use it inside a private network, or through a tunnel.
"""

from __future__ import annotations

import argparse
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
from workbench.world.greetings import Greetings, keep_alive
from workbench.world.rank_output import Echo
from workbench.world.rank_processes import STACK_SECONDS, Gang

KEY = "WORKBENCH_KEY"
DIAL_SECONDS = 120.0
EARLY_SECONDS, EARLY_ENDS = 1.0, 5


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """The shared key from a file that only its owner can read, or else from the environment variable WORKBENCH_KEY.

    WorkbenchError, which never shows the key, where there is none or it is too short or open to others.
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
                             f"give the same to every machine, in a file or in {KEY}")
    return key


def read_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, or `PORT` for loopback. WorkbenchError for anything else."""
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise WorkbenchError(f"address {text!r}: expected HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]") or "127.0.0.1", int(port)


class Door:
    """A listening socket, at which the workers of one generation after another report."""

    def __init__(self, address: str, key: bytes) -> None:
        self.address, self._key = address, key
        host, port = read_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise WorkbenchError(f"ranks(listen={address!r}): cannot listen there: {error.strerror}") from None

    def admit(self, size: int, backend: str, seconds: float, echo: Echo) -> RemoteGang:
        """Wait for `size` workers. WorkbenchError where they are not as many, or too few come in time."""
        admitted: dict[int, tuple[Connection, dict[str, Any]]] = {}
        limit = time.monotonic() + seconds
        try:
            with Greetings(self._key, size) as greetings:
                while len(admitted) < size:
                    if (left := limit - time.monotonic()) <= 0:
                        raise WorkbenchError(
                            f"{len(admitted)} of {size} ranks called {self.address} within {seconds:g} s"
                            f"{greetings.refused()}. On each machine: torchrun ... -m workbench worker "
                            f"--connect {self.address}")
                    for channel, hello in greetings.wait(self._socket, left):
                        if (earlier := admitted.get(hello["rank"])) is not None:  # its keeper has started another
                            earlier[0].close()
                        admitted[hello["rank"]] = (channel, hello)
                        if hello["size"] != size:
                            raise WorkbenchError(f"ranks(n={size}, listen={self.address!r}): torchrun started "
                                                 f"{hello['size']} ranks: start {size}, or make n {hello['size']}")
        except BaseException:
            for channel, _ in admitted.values():
                channel.close()
            raise
        return RemoteGang(size, backend, [admitted[rank] for rank in range(size)], echo)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


class RemoteGang(Gang):
    """Ranks that called. They end when they lose their channel, and their keepers start others."""

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
        return {rank: read_stack(text) for rank, text in self.told(ranks, STACK_SECONDS).items()}


def read_arguments() -> argparse.Namespace:
    """The worker's command line. WorkbenchError where torchrun did not start it."""
    parser = argparse.ArgumentParser(prog="python -m workbench.world.worker", description="one rank of a pool that "
                                     "listens: start it with torchrun, once for each rank")
    parser.add_argument("--connect", required=True, metavar="HOST:PORT", help="where `ranks(n, listen=...)` listens")
    parser.add_argument("--key-file", metavar="PATH", help=f"the shared key; default: the variable {KEY}")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)  # the rank itself, under its keeper
    missing = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    asked = parser.parse_args()
    if missing:
        raise WorkbenchError(f"{', '.join(missing)} not set: start this with torchrun")
    return asked


def keep_a_rank() -> NoReturn:
    """Start a rank, and another whenever one ends, until the pool lets it go: torchrun sees no failure."""
    def leave(*_: object) -> NoReturn:
        rank.kill()
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, leave)
    early = 0
    while True:
        started = time.monotonic()
        rank = subprocess.Popen([sys.executable, "-m", "workbench.world.worker", *sys.argv[1:], "--rank"],
                                start_new_session=True)
        status = rank.wait()
        if status in (0, 2):  # the pool is closed; it could not be reached
            raise SystemExit(status)
        early = early + 1 if time.monotonic() < started + EARLY_SECONDS else 0
        if early == EARLY_ENDS:
            raise SystemExit(f"error: the rank ended {early} times as soon as it had started: see above")


def dial(address: str, key: bytes, hello: dict[str, Any]) -> tuple[Connection, dict[str, Any]]:
    """In a worker: call the pool, show the key and see its, and take the job. WorkbenchError where that fails."""
    host, port = read_address(address)
    limit = time.monotonic() + DIAL_SECONDS
    while True:
        connection = None
        try:
            connection = socket.create_connection((host, port), timeout=5)
            connection.settimeout(None)
            keep_alive(connection)
            channel = Connection(connection.detach())
            # the pool answers when its next call comes
            answer_challenge(channel, key)
            deliver_challenge(channel, key)
            break
        except AuthenticationError:
            raise WorkbenchError(f"--connect {address}: the pool there has another key") from None
        except (EOFError, OSError) as error:  # among many strangers, the pool may have closed it before it was greeted
            if time.monotonic() > limit:
                if connection is not None:
                    raise
                said = getattr(error, "strerror", None) or error
                raise WorkbenchError(f"--connect {address}: no pool listens there: {said}") from None
            time.sleep(0.5)
    channel.send_bytes(dumps(hello))
    return channel, loads(channel.recv_bytes())


class Output:
    """What this process and its children write to stdout and stderr, sent to the pool instead."""

    def __init__(self, send: Callable[[str, bytes], None]) -> None:
        self._send, self._reading = send, threading.Lock()
        self._read, write = os.pipe()
        for fd in (1, 2):
            os.dup2(write, fd)
        os.close(write)

    def pump(self) -> None:
        """Send what comes, for ever: for a thread of its own."""
        while True:
            select.select([self._read], [], [])
            self.drain()

    def drain(self) -> None:
        """Send what has been written so far."""
        with self._reading:
            while select.select([self._read], [], [], 0)[0]:
                self._send("output", os.read(self._read, 1 << 16))
