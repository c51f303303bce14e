"""The whole course without a browser: runs the lessons' notebooks in parallel, and writes one page of results."""

from __future__ import annotations

import html
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from workbench.errors import WorkbenchError, temporary
from workbench.notebook.lessons.headless import run_lesson
from workbench.notebook.lessons.lesson import Lesson, load_lesson, parameters
from workbench.notebook.lessons.scores import SCORES, keep_score, load_scores
from workbench.notebook.recorded_figures import RECORD
from workbench.pipeline.machine import gpus
from workbench.pipeline.progress import Progress, telling
from workbench.recipe.files import write_whole
from workbench.tools.command_end import end_group, ending_on_sigterm, signal_group

_NEEDED = {"cpu": 0, "gpu": 1, "multi_gpu": 2}


@dataclass(frozen=True)
class Outcome:
    """One lesson's run: seconds, and why it failed or was skipped, or ""."""

    lesson: Lesson
    seconds: float
    problem: str = ""
    left_out: bool = False


def values_of(lesson: Lesson, profile: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The lesson's parameters: the profile's, else defaults, with the changes. LessonError for an invalid value."""
    kept = {**lesson.profiles.get(profile, {}), **changes}  # type: ignore[call-overload]
    return dict(parameters(lesson, **kept).model_dump())


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
    progress: Progress = True,
) -> list[Outcome]:
    """Execute the notebooks of these lessons into `out`, each in its own process, and write out/index.html.

    jobs: how many run at once (default: one for every two cores; with the profile gpu only one, so that measurements do
    not disturb each other). changes: parameters by lesson. record: a folder for figures measured on GPUs. timeout:
    seconds for one notebook. tell: called with a line for each that is done. progress: as for `run`. Raises LessonError
    for an invalid parameter before anything runs.
    """
    lessons = [load_lesson(name) for name in names]
    values = {
        each.name: values_of(each, profile, (changes or {}).get(each.name, {})) for each in lessons
    }
    out.mkdir(parents=True, exist_ok=True)
    have = gpus()
    if jobs is None:
        jobs = 1 if profile == "gpu" else max(1, len(os.sched_getaffinity(0)) // 2)
    running: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    stopped = threading.Event()

    def one(lesson: Lesson) -> Outcome:
        if stopped.is_set():
            return Outcome(lesson, 0.0, "not started", left_out=True)
        if have < _NEEDED[lesson.needs]:
            done = Outcome(
                lesson,
                0.0,
                f"needs {_NEEDED[lesson.needs]} GPU(s), and this machine has {have}",
                True,
            )
        else:
            stage(f"run {lesson.name}")
            done = _run(lesson, values[lesson.name], out, record, timeout, running)
        stage.rest()
        tell(
            f"{lesson.name}: {done.problem or 'done'}"
            + (f" ({done.seconds:.0f} s)" if done.seconds else "")
        )
        return done

    with telling(progress) as stage, ThreadPoolExecutor(jobs) as pool:
        try:
            found = list(pool.map(one, lessons))
        except BaseException:
            stopped.set()
            while not running.empty():
                signal_group(running.get(), signal.SIGTERM)  # the thread that waits for it returns
            raise
    write_whole(out / "index.html", _index(found, profile, out))
    return found


def _run(lesson: Lesson, values: dict[str, Any], out: Path, record: Path | None, timeout: float,
         running: queue.SimpleQueue[subprocess.Popen[str]]) -> Outcome:
    began = time.monotonic()
    env = {**os.environ, **({RECORD: str(record.absolute())} if record else {})}
    command = [sys.executable, "-m", "workbench.notebook.lessons.headless", lesson.name, json.dumps(values),
               str(out.absolute())]
    child = subprocess.Popen(command, text=True, env=env, start_new_session=True, stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE)
    running.put(child)
    try:
        said = child.communicate(timeout=timeout)[1]
    except subprocess.TimeoutExpired:
        end_group(child, signal.SIGTERM)
        return Outcome(
            lesson,
            time.monotonic() - began,
            f"not done after {timeout:g} s: give it more with --timeout",
        )
    why = "" if child.returncode == 0 else said.strip()[-2000:] or f"ended with {child.returncode}"
    return Outcome(lesson, time.monotonic() - began, why)


def _index(found: Sequence[Outcome], profile: str, out: Path) -> str:
    """The page of results; of a failed run it links the notebook, since there is no page."""
    rows = []
    for each in found:
        name = html.escape(each.lesson.name)
        kinds = ("ipynb",) if each.problem else ("html", "ipynb")
        file = next((f for kind in kinds if (out / (f := f"{name}.{kind}")).exists()), "")
        link = f'<a href="{file}">{name}</a>' if file and not each.left_out else name
        rows.append(
            f"<tr><td>{link}</td><td>{html.escape(each.lesson.question)}</td><td>{each.seconds:.0f} s</td>"
            f"<td><pre>{html.escape(each.problem or 'done')}</pre></td></tr>"
        )
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>The course</title>'
        "<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.3em .8em;vertical-align:top}"
        "pre{white-space:pre-wrap;margin:0}</style>"
        f"<h1>The course, profile {profile}</h1><table><tr><th>lesson</th><th>question</th><th>time</th>"
        f"<th>outcome</th></tr>{''.join(rows)}</table></html>\n"
    )


def check_lesson(name: str, notebook: Path | None = None) -> dict[str, float]:
    """Run a notebook with the reader's answers in it, and store and return each checkpoint's score.

    notebook: a copy to run instead of the checkout's. Raises NotebookError where a cell fails, and WorkbenchError for a
    notebook that checks nothing of this lesson.
    """
    lesson = load_lesson(name)
    with temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-check-")) as folder:
        path = Path(folder) / "scores.json"  # scores of this run only
        with mock.patch.dict(os.environ, {SCORES: str(path)}):
            run_lesson(name, None, Path(folder), source=notebook)
        found = load_scores(path).get(name, {})
    if lesson.checkpoints and not found:
        raise WorkbenchError(
            f"{notebook or name}: it checks nothing of lesson {name!r}: is it the notebook of another "
            "lesson?"
        )
    for point, kept in found.items():
        keep_score(name, point, kept.get("score", 0.0))
    return {point.name: found.get(point.name, {}).get("score", 0.0) for point in lesson.checkpoints}
