"""The whole course without a browser: runs the lessons' notebooks in parallel, and writes one page of results."""

from __future__ import annotations

import html
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from workbench.errors import WorkbenchError, temporary
from workbench.pipeline.progress import telling
from workbench.recipe.files import write_whole
from workbench_lessons.course.course_site import page_of_rows
from workbench_lessons.course.headless import run_lesson
from workbench_lessons.course.lesson import Lesson, load_lesson, parameters
from workbench_lessons.course.recorded_figures import RECORD
from workbench_lessons.course.scores import SCORES, keep_score, load_scores

ENDS = 15.0  # seconds that a child gets to end by itself


@dataclass(frozen=True)
class Outcome:
    """One lesson's run: seconds, and why it failed, or ""."""

    lesson: Lesson
    seconds: float
    problem: str = ""


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """In this block, SIGTERM raises SystemExit, so that children, which have their own sessions, end too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def signal_group(child: subprocess.Popen[str], how: signal.Signals) -> None:
    """Send a signal to a child's process group, unless the child has ended: its number may be another's."""
    if child.poll() is None:
        os.killpg(child.pid, how)


def end_group(child: subprocess.Popen[str], how: signal.Signals) -> None:
    """End a child. Its ranks and kernels end by themselves when it is gone."""
    signal_group(child, how)
    try:
        child.communicate(timeout=ENDS)
    except subprocess.TimeoutExpired:
        signal_group(child, signal.SIGKILL)
        child.communicate()


@ending_on_sigterm()
def run_course(
    names: Sequence[str],
    out: Path,
    *,
    profile: str = "laptop",
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    jobs: int | None = None,
    record: Path | None = None,
    timeout: float = 900.0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Execute the notebooks of these lessons into `out`, each in its own process, and write out/index.html.

    jobs: how many run at once (default: one for every two cores; with the profile gpu only one, so that measurements do
    not disturb each other). changes: parameters by lesson. record: a folder for figures measured on GPUs. timeout:
    seconds for one notebook. tell: called with a line for each that is done. Raises LessonError for an invalid
    parameter before anything runs.
    """
    if record is not None and record.is_file():
        raise WorkbenchError(f"--record {record}: is a file: give a folder")
    lessons = [load_lesson(name) for name in names]
    values = {}
    for lesson in lessons:
        overrides = dict(lesson.profiles["small"]) if profile == "small" else {}
        overrides |= (changes or {}).get(lesson.name, {})
        values[lesson.name] = parameters(lesson, **overrides).model_dump()
    out.mkdir(parents=True, exist_ok=True)
    if jobs is None:
        jobs = 1 if profile == "gpu" else max(1, len(os.sched_getaffinity(0)) // 2)
    running: list[subprocess.Popen[str]] = []

    def run_one(lesson: Lesson) -> Outcome:
        stage(f"run {lesson.name}")
        outcome = _run(lesson, values[lesson.name], out, record, timeout, running)
        stage.rest()
        tell(f"{lesson.name}: {outcome.problem or 'done'} ({outcome.seconds:.0f} s)")
        return outcome

    with telling() as stage, ThreadPoolExecutor(jobs) as pool:
        try:
            outcomes = list(pool.map(run_one, lessons))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in running:
                signal_group(child, signal.SIGTERM)  # the thread that waits for it returns
            raise
    rows = [_row(outcome, out) for outcome in outcomes]
    columns = ("lesson", "question", "time", "outcome")
    write_whole(out / "index.html", page_of_rows(f"The course, profile {profile}", columns, rows))
    return outcomes


def _run(lesson: Lesson, values: dict[str, Any], out: Path, record: Path | None, timeout: float,
         running: list[subprocess.Popen[str]]) -> Outcome:
    began = time.monotonic()
    env = {**os.environ, **({RECORD: str(record.absolute())} if record else {})}
    command = [sys.executable, "-m", "workbench_lessons.course.headless", lesson.name, json.dumps(values),
               str(out.absolute())]
    child = subprocess.Popen(command, text=True, env=env, start_new_session=True, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
    running.append(child)
    try:
        errors = child.communicate(timeout=timeout)[1].strip()[-2000:]
        problem = "" if child.returncode == 0 else errors or f"ended with {child.returncode}"
    except subprocess.TimeoutExpired:
        end_group(child, signal.SIGTERM)
        problem = f"not done after {timeout:g} s: give it more with --timeout"
    return Outcome(lesson, time.monotonic() - began, problem)


def _row(outcome: Outcome, out: Path) -> list[str]:
    """The cells of a run; that of a failed run links the notebook, since there is no page."""
    name, link = outcome.lesson.name, html.escape(outcome.lesson.name)
    file = f"{name}.{'ipynb' if outcome.problem else 'html'}"
    if (out / file).exists():
        link = f'<a href="{file}">{link}</a>'
    return [link, html.escape(outcome.lesson.question), f"{outcome.seconds:.0f} s",
            f"<pre>{html.escape(outcome.problem or 'done')}</pre>"]


def check_lesson(name: str, notebook: Path | None = None) -> dict[str, float]:
    """Run a notebook with the reader's answers in it, and store and return each checkpoint's score.

    notebook: a copy to run instead of the package's. Raises NotebookError where a cell fails, and WorkbenchError for a
    notebook that checks nothing of this lesson.
    """
    lesson = load_lesson(name)
    with temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-check-")) as folder:
        path = Path(folder) / "scores.json"  # scores of this run only
        with mock.patch.dict(os.environ, {SCORES: str(path)}):
            run_lesson(name, None, Path(folder), source=notebook)
        scores = load_scores(path).get(name, {})
    if lesson.checkpoints and not scores:
        raise WorkbenchError(f"{notebook or name}: it checks nothing of lesson {name!r}: "
                             "is it that of another lesson?")
    for point, kept in scores.items():
        keep_score(name, point, kept.get("score", 0.0))
    return {
        point.name: scores.get(point.name, {}).get("score", 0.0) for point in lesson.checkpoints
    }
