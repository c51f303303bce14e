"""Show the ranks' output in the parent, each line with its rank."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence

ECHOES = ("live", "grouped", "rank0", "none")
TAIL_LINES = 10
BAR_SECONDS = 0.1


class Echo:
    """Shows the ranks' output line by line, each with its rank, and keeps each rank's last lines.

    Mode "live": at once, with a moving progress bar, that of the lowest rank that draws one; "grouped": after the
    call, in rank order; "rank0": that rank's only, at once; "none".
    """

    def __init__(self, mode: str, size: int) -> None:
        self.mode, self.quiet = mode, True
        self._part = [b""] * size
        self._grouped: list[list[str]] = [[] for _ in range(size)]
        self._bar, self._drawn = "", 0.0
        self.tail: list[deque[str]] = [deque(maxlen=TAIL_LINES) for _ in range(size)]

    def feed(self, rank: int, data: bytes) -> None:
        """Take a rank's output: show complete lines, and keep the rest for later."""
        *lines, self._part[rank] = (self._part[rank] + data).split(b"\n")
        # A progress bar rewrites its line: show its last state.
        self._show(rank, [_last_state(line) for line in lines])
        before, cr, last = self._part[rank].rstrip(b"\r").rpartition(b"\r")
        if before:
            self._part[rank] = cr + last
        if self.mode == "live" and not self.quiet and time.monotonic() > self._drawn + BAR_SECONDS:
            self._draw()

    def finish(self) -> None:
        """End of a call: show unfinished lines and, in mode "grouped", everything."""
        for rank, part in enumerate(self._part):
            if part:
                self.feed(rank, b"\n")
        for lines in self._grouped:
            sys.stdout.write("".join(lines))
            lines.clear()

    def clear_bar(self) -> None:
        """Remove a moving bar before something is shown below it."""
        sys.stdout.write(self._wiped())
        sys.stdout.flush()

    def _show(self, rank: int, lines: Sequence[str]) -> None:
        self.tail[rank].extend(lines)
        if self.quiet or self.mode == "none" or (self.mode == "rank0" and rank != 0):
            return
        text = [f"[rank {rank}] {line}\n" for line in lines]
        if self.mode == "grouped":
            self._grouped[rank].extend(text)
        elif text:
            sys.stdout.write(self._wiped() + "".join(text))
            sys.stdout.flush()

    def _draw(self) -> None:
        moving = [(rank, part) for rank, part in enumerate(self._part) if b"\r" in part]
        if moving:
            rank, part = moving[0]
            bar = f"[rank {rank}] {_last_state(part)}"
            sys.stdout.write(f"{self._wiped()}{bar}\r")
            sys.stdout.flush()
            self._bar, self._drawn = bar, time.monotonic()

    def _wiped(self) -> str:
        """The text that overwrites the bar, at whose beginning the cursor is."""
        blank, self._bar = f"{' ' * len(self._bar)}\r" if self._bar else "", ""
        return blank


def _last_state(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r").rsplit("\r")[-1]
