"""What runs now: one line that ticks, on a terminal or in a notebook; else a line a stage on stderr.

Each rank posts what it starts; the process that called it tells rank 0's posts. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from workbench.torch_api.supported import require_torch

PROGRESS = "WORKBENCH_PROGRESS"
"""Environment variable: "0" shows no progress, for notebooks whose output is compared or kept."""
REPORTS = "WORKBENCH_REPORTS"
"""Environment variable: a folder for all reports, for a program that executes a notebook."""
TICK_SECONDS = 1.0
Progress = bool | Callable[[str], Any]
"""Whether to show progress, or a function to call with the name of each stage before it runs."""
Message = tuple[str, str]
"""("stage", its name) or ("at", how far it is)."""


class Teller:
    """Called with the name of each stage before it starts. This one shows nothing."""

    def __call__(self, stage: str) -> None:
        pass

    def of(self, who: str) -> Callable[[str], None]:
        """What to call with the stages of one of several, such as "rank 3"."""
        return lambda stage: self(f"{who}: {stage}")

    def at(self, where: str) -> None:
        """How far the stage is, such as "step 3 of 20"."""

    def rest(self) -> None:
        """Something else is to be printed now."""

    def close(self) -> None:
        """No stage runs any more."""

    def hear(self, message: Message) -> None:
        """A message of a `Post`."""
        kind, text = message
        (self if kind == "stage" else self.at)(text)


class Lines(Teller):
    """Calls a function with each stage; by default one that prints it as a line on stderr."""

    def __init__(self, say: Callable[[str], Any] | None = None) -> None:
        self._say = say or (lambda stage: print(f"workbench: {stage}", file=sys.stderr, flush=True))

    def __call__(self, stage: str) -> None:
        self._say(stage)


class Ticking(Teller):
    """One line with the stage and its seconds, which a thread draws again every TICK_SECONDS.

    draw: shows a text in the place of the one before; "" removes it.
    """

    def __init__(self, draw: Callable[[str], None]) -> None:
        self._draw, self._lock, self._ended = draw, threading.Lock(), threading.Event()
        self._stage, self._at, self._began = "", "", 0.0
        self._thread = threading.Thread(target=self._tick, daemon=True, name="progress")

    def __call__(self, stage: str) -> None:
        with self._lock:
            self._stage, self._at, self._began = stage, "", time.monotonic()
            self._show()
        if not self._thread.is_alive():
            self._thread.start()

    def at(self, where: str) -> None:
        self._at = f", {where}"  # drawn with the next tick: steps may be short

    def rest(self) -> None:
        with self._lock:
            self._draw("")

    def close(self) -> None:
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()
            self._draw("")

    def _show(self) -> None:
        self._draw(f"{self._stage}{self._at}  {time.monotonic() - self._began:.0f} s")

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            with self._lock:
                self._show()


def on_terminal(text: str) -> None:
    """Rewrite the last line of the terminal behind stderr. The cursor stays at its beginning."""
    width = shutil.get_terminal_size().columns - 1
    with suppress(OSError):  # a terminal that is gone ends no run
        sys.stderr.write(f"\r{text[:width]}\033[K\r")
        sys.stderr.flush()


class InNotebook:
    """A line below the cell, which leaves nothing: no stream is written. Short calls show none."""

    def __init__(self) -> None:
        self._began, self._handle = time.monotonic(), None

    def __call__(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text} if text else {}
        if self._handle is not None:
            self._handle.update(data, raw=True)
        elif text and time.monotonic() - self._began > TICK_SECONDS:
            self._handle = display(data, raw=True, display_id=True)


def _teller() -> Teller:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return Ticking(InNotebook())
    return Ticking(on_terminal) if sys.stderr.isatty() else Lines()


@contextmanager
def telling(progress: Progress = True) -> Iterator[Teller]:
    """What to call with the name of each stage. A ticking line is removed at the end.

    Shows nothing where `progress` is False or WORKBENCH_PROGRESS is 0, and on ranks other than 0.
    """
    teller = Teller()
    if callable(progress):
        teller = Lines(progress)
    elif progress and os.environ.get(PROGRESS) != "0" and os.environ.get("RANK", "0") == "0":
        teller = _teller()
    try:
        yield teller
    finally:
        teller.close()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Around imports that import torch, which takes seconds.

    WorkbenchError where torch is missing or unsupported.
    """
    require_torch()
    with telling() as tell:
        tell("load torch")
        yield


class Post:
    """The progress of a rank, passed to `send`: `Teller.hear`, the channel to the pool, or nothing. steps: of the
    training.
    """

    def __init__(self, send: Callable[[Message], None] | None = None, steps: int = 0) -> None:
        self._send, self._steps = send or (lambda _: None), steps

    def stage(self, name: str) -> None:
        """A stage starts."""
        self._send(("stage", name))

    def step(self, index: int, loss: float) -> None:
        """A training step has ended."""
        self._send(("at", f"step {index + 1} of {self._steps}, loss {loss:.3f}"))
