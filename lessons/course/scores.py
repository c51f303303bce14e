"""A reader's best score of each checkpoint and the number of hints taken, in one small file.

The file is $WORKBENCH_SCORES, else workbench/scores.json in the user's data folder; an empty variable stores nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.files import json_of, reading, write_whole

SCORES = "WORKBENCH_SCORES"
Scores = dict[str, dict[str, dict[str, float]]]  # lesson, checkpoint, "score" or "hints"


def scores_file() -> Path | None:
    """The file of the scores; None if they are not stored."""
    setting = os.environ.get(SCORES)
    if setting is not None:
        return Path(setting) if setting else None
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "workbench" / "scores.json"


def load_scores(path: Path | None = None) -> Scores:
    """All scores; empty without a file. WorkbenchError names a file with other contents."""
    path = path or scores_file()
    if path is None:
        return {}
    scores: Scores = {}
    with (
        contextlib.suppress(FileNotFoundError),
        reading(path, "scores", f"remove it, or set {SCORES}"),
    ):
        scores = json_of(path.read_bytes())
        kept = [
            value
            for points in scores.values()
            for values in points.values()
            for value in values.values()
        ]
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in kept):
            raise ValueError("a score must be a number, 0 or more")
    return scores


def score_of(scores: Scores, lesson: str, checkpoint: str) -> float:
    """The best score of a checkpoint; 0 where it was not tried."""
    return scores.get(lesson, {}).get(checkpoint, {}).get("score", 0.0)


def keep_score(lesson: str, checkpoint: str, score: float) -> None:
    """Store a score if it is the best so far. Warns where the file cannot be written."""
    with _changing() as scores:
        kept = scores.setdefault(lesson, {}).setdefault(checkpoint, {})
        kept["score"] = max(score, kept.get("score", 0.0))


def take_hint(lesson: str, checkpoint: str, hints: int) -> int:
    """How many of a checkpoint's `hints` the reader may see: one more than before; all if nothing is stored."""
    if scores_file() is None:
        return hints
    with _changing() as scores:
        kept = scores.setdefault(lesson, {}).setdefault(checkpoint, {})
        kept["hints"] = min(int(kept.get("hints", 0)) + 1, hints)
        return int(kept["hints"])


@contextlib.contextmanager
def _changing() -> Iterator[Any]:
    """The scores, written back at the end if they changed, under a lock between processes."""
    path = scores_file()
    if path is None:
        yield {}
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_suffix(".lock"), "w")  # noqa: SIM115 - closed below
    except OSError as error:
        warnings.warn(f"{path}: scores are not kept: {error.strerror}; set {SCORES}", stacklevel=4)
        yield {}
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scores = load_scores(path)
        before = json.dumps(scores)
        yield scores
        if json.dumps(scores) != before:
            try:
                write_whole(path, json.dumps(scores, indent=2) + "\n")
            except WorkbenchError as error:
                warnings.warn(f"{error}; the score is not kept: set {SCORES}", stacklevel=4)
