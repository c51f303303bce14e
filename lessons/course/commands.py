"""`workbench course`, `lab`, `lessons`, `check`, `hint` and `tour`: the lessons from the command line."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.pipeline.progress import loading_torch, telling
from workbench.recipe.files import course_folder, write_whole
from workbench_lessons.course.grading import percent
from workbench_lessons.course.lesson import Checkpoint, Lesson, lesson_named, lesson_names, load_lesson
from workbench_lessons.course.scores import Scores, load_scores, score_of, take_hint

WIDTH = 100


def course(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench_lessons.course.headless import from_text
        from workbench_lessons.course.whole_course import run_course

    names = [lesson_named(text) for text in args.lessons] or lesson_names()
    if args.site is not None:
        from workbench_lessons.course.course_site import write_site

        with telling() as tell:
            page = write_site(names, args.site, tell=tell)
        print(f"site: {page}")
        return 0
    changes: dict[str, dict[str, str]] = {}
    for key, text in args.set:
        name, _, parameter = key.partition(".")
        if lesson_named(name) not in names or not parameter:
            raise WorkbenchError(f"--set {key}={text}: write LESSON.PARAMETER=VALUE, of a lesson of "
                                 "this run, such as 00_tour.steps=5")
        changes.setdefault(lesson_named(name), {})[parameter] = text
    values = {name: from_text(name, texts) for name, texts in changes.items()}
    outcomes = run_course(
        names, args.out, profile=args.profile, changes=values, jobs=args.jobs, record=args.record,
        timeout=args.timeout, tell=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(f"results: {args.out / 'index.html'}")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


def lessons(args: argparse.Namespace) -> int:
    scores = load_scores()
    names = lesson_names() if args.lesson is None else [lesson_named(args.lesson)]
    known = [load_lesson(name) for name in names]
    for lesson in known:
        _print(f"{lesson.name}: {lesson.question}")
        passed = sum(score_of(scores, lesson.name, point.name) >= 1 for point in lesson.checkpoints)
        done = f"{passed} of {len(lesson.checkpoints)} checkpoints passed"
        _print(f"{lesson.minutes} minutes, {done}", "  ")
        if args.lesson is not None:
            _print(lesson.about, "  ")
            for objective in lesson.learn:
                _print(f"- {objective}", "  ")
            for name, parameter in lesson.parameters.items():
                _print(f"{name} = {parameter.default}: {parameter.about}", "  ")
        for point in lesson.checkpoints:
            tried = "score" in scores.get(lesson.name, {}).get(point.name, {})
            state = percent(score_of(scores, lesson.name, point.name)) if tried else "not tried"
            _print(f"[{state}] {point.name} ({_effort(point)}): {point.task}", "  ")
    print(what_next(known, scores))
    return 0


def _print(text: str, indent: str = "") -> None:
    print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  "))


def what_next(lessons: Sequence[Lesson], scores: Scores) -> str:
    """The first checkpoint, in the course's order, that is not passed; or that all are."""
    for lesson in lessons:
        for point in lesson.checkpoints:
            if score_of(scores, lesson.name, point.name) < 1:
                place = f"lesson {lesson.name.split('_')[0]}, checkpoint {point.name}"
                return f"next: {place} ({_effort(point)}): {point.task}"
    count = sum(len(lesson.checkpoints) for lesson in lessons)
    return f"next: nothing: all {count} checkpoints are passed"


def _effort(point: Checkpoint) -> str:
    return f"{point.difficulty}, {point.minutes} min"


def lab(args: argparse.Namespace) -> int:
    """`workbench lab`: this process becomes JupyterLab."""
    if find_spec("jupyterlab") is None:
        raise WorkbenchError("lab: JupyterLab is not installed: pip install jupyterlab")
    for path in copy_course(args.folder):
        print(f"kept {path}: it differs from the package's")
    command = ["jupyterlab", f"--notebook-dir={args.folder}", str(args.folder / "notebooks/00_tour.ipynb")]
    print(f"python -m {shlex.join(command)}", flush=True)
    return os.execv(sys.executable, [sys.executable, "-m", *command])


def copy_course(folder: Path) -> list[Path]:
    """Copy notebooks, documents and examples into folders of `folder` with these names.

    Returns the files that are there and differ: they are kept.
    """
    sources = {"notebooks": [".ipynb"], "docs": [".md", ".svg"], "examples": [".py"]}
    differ = []
    for name, endings in sources.items():
        source = course_folder(name)
        for path in sorted(source.rglob("*")):
            if path.suffix not in endings:
                continue
            target, content = folder / name / path.relative_to(source), path.read_bytes()
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                write_whole(target, content)
            elif target.is_dir() or target.read_bytes() != content:
                differ.append(target)
    return differ


def check(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench_lessons.course.whole_course import check_lesson

    if args.notebook is not None and not args.notebook.is_file():
        raise WorkbenchError(f"--notebook {args.notebook}: no such file")
    name = lesson_named(args.lesson)
    mine = Path("notebooks", f"{name}.ipynb")
    scores = check_lesson(name, args.notebook or (mine if mine.is_file() else None))
    for point, score in scores.items():
        hint = "" if score >= 1 else f" (workbench hint {name.split('_')[0]} {point})"
        print(f"{point}: {percent(score)}{hint}")
    return 0 if all(score >= 1 for score in scores.values()) else 1


def hint(args: argparse.Namespace) -> int:
    lesson = load_lesson(lesson_named(args.lesson))
    point = lesson.checkpoint(args.checkpoint)
    taken = take_hint(lesson.name, point.name, len(point.hints))
    print(point.task)
    if not point.hints:
        print("this checkpoint has no hints")
    for number, text in enumerate(point.hints[:taken], 1):
        print(f"hint {number} of {len(point.hints)}: {text}")
    return 0


def tour(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench_lessons.course.headless import from_text, run_lesson

    values = from_text("00_tour", dict(args.set))
    done = run_lesson("00_tour", values, args.out)
    for table in done.tables[:1]:  # of the four passes; the others are of passes that the lesson breaks
        print(f"\n{table.rstrip()}")
    print(f"\nexecuted notebook: {done.notebook}\nas a page:         {done.page}")
    return 0
