"""`workbench course`, `lessons`, `check` and `hint`: the lessons from the command line."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.notebook.lessons.grading import percent
from workbench.notebook.lessons.lesson import Checkpoint, Lesson, lesson_named, lesson_names, load_lesson
from workbench.notebook.lessons.scores import Scores, load_scores, take_hint
from workbench.pipeline.progress import loading_torch, telling

WIDTH = 100


def course(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench.notebook.lessons.course import run_course
        from workbench.notebook.lessons.headless import from_text

    if args.record is not None and args.record.exists() and not args.record.is_dir():
        raise WorkbenchError(f"--record {args.record}: is a file: give a folder")
    names = [lesson_named(text) for text in args.lessons] or lesson_names()
    if args.site is not None:
        from workbench.notebook.lessons.course_site import write_site

        with telling() as tell:
            page = write_site(names, args.site, tell=tell)
        print(f"site: {page}")
        return 0
    texts: dict[str, dict[str, str]] = {}
    for key, text in args.set:
        name, dot, parameter = key.partition(".")
        if not (dot and parameter):
            raise WorkbenchError(
                f"--set {key}={text}: write LESSON.PARAMETER=VALUE, such as 00_tour.steps=5"
            )
        if lesson_named(name) not in names:
            raise WorkbenchError(
                f"--set {key}={text}: {lesson_named(name)} is not among the lessons of this run"
            )
        texts.setdefault(lesson_named(name), {})[parameter] = text
    changes: dict[str, Any] = {name: from_text(name, given) for name, given in texts.items()}
    found = run_course(names, args.out, profile=args.profile, changes=changes, jobs=args.jobs, record=args.record,
                       timeout=args.timeout, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(f"results: {args.out / 'index.html'}")
    return 1 if any(each.problem and not each.left_out for each in found) else 0


def lessons(args: argparse.Namespace) -> int:
    scores = load_scores()
    names = lesson_names() if args.lesson is None else [lesson_named(args.lesson)]
    known = [load_lesson(name) for name in names]
    for lesson in known:
        print(
            "\n".join(
                textwrap.wrap(f"{lesson.name}: {lesson.question}", WIDTH, subsequent_indent="  ")
            )
        )
        passed = sum(_score(scores, lesson, point) >= 1 for point in lesson.checkpoints)
        done = (
            f", {passed} of {len(lesson.checkpoints)} checkpoints passed"
            if lesson.checkpoints
            else ""
        )
        print(f"  {lesson.minutes} minutes, {lesson.needed}{done}")
        if args.lesson is not None:
            _tell(lesson)
        for point in lesson.checkpoints:
            tried = "score" in scores.get(lesson.name, {}).get(point.name, {})
            state = percent(_score(scores, lesson, point)) if tried else "not tried"
            print("\n".join(textwrap.wrap(f"[{state}] {point.name} ({_effort(point)}): {point.task}", WIDTH,
                                          initial_indent="  ", subsequent_indent="      ")))
    print(what_next(known, scores))
    return 0


def _tell(lesson: Lesson) -> None:
    """What the reader will do and learn, and the notebook's parameters."""
    rows = [lesson.about, *(f"- {objective}" for objective in lesson.learn)]
    rows += [
        f"{name} = {given.default}: {given.about}" for name, given in lesson.parameters.items()
    ]
    for row in rows:
        print("\n".join(textwrap.wrap(row, WIDTH, initial_indent="  ", subsequent_indent="    ")))


def what_next(lessons: Sequence[Lesson], scores: Scores) -> str:
    """The first checkpoint, in the course's order, that is not passed; or that all are."""
    for lesson in lessons:
        for point in lesson.checkpoints:
            if _score(scores, lesson, point) < 1:
                return (
                    f"next: lesson {lesson.name.split('_')[0]}, checkpoint {point.name} ({_effort(point)}): "
                    f"{point.task}"
                )
    return f"next: nothing: all {sum(len(lesson.checkpoints) for lesson in lessons)} checkpoints are passed"


def _score(scores: Scores, lesson: Lesson, point: Checkpoint) -> float:
    return scores.get(lesson.name, {}).get(point.name, {}).get("score", 0.0)


def _effort(point: Checkpoint) -> str:
    return f"{point.difficulty}, {point.minutes} min"


def check(args: argparse.Namespace) -> int:
    with loading_torch():
        from workbench.notebook.lessons.course import check_lesson

    if args.notebook is not None and not args.notebook.is_file():
        raise WorkbenchError(
            f"--notebook {args.notebook}: {'a folder' if args.notebook.is_dir() else 'no such file'}"
        )
    name = lesson_named(args.lesson)
    scores = check_lesson(name, args.notebook)
    for point, score in scores.items():
        print(
            f"{point}: {percent(score)}"
            + ("" if score >= 1 else f" (workbench hint {name.split('_')[0]} {point})")
        )
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
