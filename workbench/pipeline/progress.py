"""Progress bars of a run: each rank posts what it starts, and the process that called it draws rank 0's posts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

PROGRESS = "WORKBENCH_PROGRESS"
"""Environment variable: "0" draws no bars, for notebooks whose output is compared or kept."""
REPORTS = "WORKBENCH_REPORTS"
"""Environment variable: a folder for all reports of this process, for a program that executes a notebook."""
Message = tuple[Any, ...]
"""The name of a method of `Bars`, and its arguments."""


class NotebookLine:
    """A file for tqdm that shows what was written last: stderr would leave an empty pink bar in the notebook."""

    encoding = "utf-8"  # tqdm draws with blocks

    def __init__(self) -> None:
        from IPython.display import display

        self.shown = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        self.shown.update({"text/plain": text.strip()}, raw=True)

    def flush(self) -> None:
        """Each line is sent as it is written."""


class Bars:
    """Two bars, one after the other: the stages of the build, then the training steps. On stderr, or in a notebook."""

    def __init__(self, stages: int, steps: int) -> None:
        self.stages, self.steps = stages, steps
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        self.file: Any = NotebookLine() if hasattr(shell, "kernel") else sys.stderr
        self.bar: tqdm[Any] | None = None
        self.training = False

    def draw(self, message: Message) -> None:
        """Draw one message of a `Post`."""
        kind, *values = message
        getattr(self, kind)(*values)

    def stage(self, name: str) -> None:
        if self.bar is None or self.training:
            self._open(name, self.stages, "{desc:<28} {n}/{total} |{bar:30}| {elapsed}")
            return
        self.bar.set_description_str(name, refresh=False)
        self.bar.n = min(self.bar.n + 1, self.stages)
        self.bar.refresh()

    def step(self, index: int, loss: float) -> None:
        if not self.training:
            self._open("train", self.steps, "{desc:<28} {n}/{total} |{bar:30}| {elapsed}, {rate_fmt}")
            self.training = True
        assert self.bar is not None
        self.bar.set_description_str(f"train, loss {loss:.3f}", refresh=False)
        self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar, self.training = None, False

    def _open(self, name: str, total: int, form: str) -> None:
        self.close()
        self.bar = tqdm(desc=name, total=total, bar_format=form, unit=" steps", file=self.file, leave=False, ncols=100)


class Post:
    """The progress of a rank, passed to `send`: `Bars.draw`, the channel to the pool, or nothing.

    began: when the run began, by `time.perf_counter`. start: (joining, seconds from there to the end of the first
    training step). joining: seconds that this rank took to join the others before, with its wait for them.
    """

    def __init__(self, send: Callable[[Message], None] | None = None, began: float | None = None,
                 joining: float = 0.0) -> None:
        self._send = send or (lambda _: None)
        self.began = time.perf_counter() if began is None else began
        self.joining = joining
        self.start: tuple[float, float] | None = None

    def stage(self, name: str) -> None:
        """A stage of the build starts."""
        self._send(("stage", name))

    def step(self, index: int, loss: float) -> None:
        """A training step has ended."""
        if self.start is None:
            self.start = self.joining, time.perf_counter() - self.began
        self._send(("step", index, loss))


@contextmanager
def bars(stages: int, steps: int, shown: bool) -> Iterator[Callable[[Message], None] | None]:
    """`Bars.draw`, or None if no bars are wanted: `shown` is False, or WORKBENCH_PROGRESS is 0."""
    if not shown or os.environ.get(PROGRESS) == "0":
        yield None
        return
    drawn = Bars(stages, steps)
    try:
        yield drawn.draw
    finally:
        drawn.close()
