"""Progress of a run that happens in other processes: rank 0 writes what it starts, the caller draws the bars."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

EVERY_SECONDS = 0.1
PROGRESS = "WORKBENCH_PROGRESS"
"""Environment variable: "0" draws no bars, for notebooks that are executed to be compared or kept."""
REPORTS = "WORKBENCH_REPORTS"
"""Environment variable: a folder in which every report of this process is left, for who runs a notebook unseen."""


class Bars:
    """Two bars on stderr, one after the other: the stages of the build, then the training steps."""

    def __init__(self, stages: int, steps: int) -> None:
        self.stages, self.steps = stages, steps
        self.bar: tqdm[Any] | None = None
        self.training = False

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
        self.bar = tqdm(desc=name, total=total, bar_format=form, unit=" steps", file=sys.stderr, leave=False, ncols=100)


class Post:
    """What a rank tells of its progress: to bars in this process, into a file, or to nobody."""

    def __init__(self, bars: Bars | None = None, path: Path | None = None) -> None:
        self.bars, self.path = bars, path

    def stage(self, name: str) -> None:
        self._send("stage", name)

    def step(self, index: int, loss: float) -> None:
        self._send("step", index, loss)

    def _send(self, kind: str, *values: Any) -> None:
        if self.bars is not None:
            getattr(self.bars, kind)(*values)
        elif self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([kind, *values]) + "\n")


def wanted(asked: bool) -> bool:
    """Whether to draw: asked for, and not turned off by the environment."""
    return asked and os.environ.get(PROGRESS) != "0"


@contextmanager
def local_bars(stages: int, steps: int, shown: bool) -> Iterator[Post]:
    """Bars for a run in this process."""
    if not wanted(shown):
        yield Post()
        return
    bars = Bars(stages, steps)
    try:
        yield Post(bars)
    finally:
        bars.close()


@contextmanager
def bars_from_file(stages: int, steps: int, shown: bool) -> Iterator[Path | None]:
    """The path of a file to give to rank 0's `Post`; what arrives there is drawn. The file goes away at the end."""
    if not wanted(shown):
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="workbench-progress-"))
    path, bars, done = folder / "rank0.jsonl", Bars(stages, steps), threading.Event()
    path.touch()
    follower = threading.Thread(target=_follow, args=(path, bars, done), daemon=True, name="progress")
    follower.start()
    try:
        yield path
    finally:
        done.set()
        follower.join()
        bars.close()
        shutil.rmtree(folder, ignore_errors=True)


def _follow(path: Path, bars: Bars, done: threading.Event) -> None:
    with path.open(encoding="utf-8") as stream:
        part = ""
        while True:
            last = done.wait(EVERY_SECONDS)
            part += stream.read()
            *lines, part = part.split("\n")
            for line in lines:
                kind, *values = json.loads(line)
                getattr(bars, kind)(*values)
            if last:
                return
