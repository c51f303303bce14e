"""What runs and grades the lessons. It joins the workbench as a plugin: its commands, and the names that notebooks use.

    commands          `workbench course`, `lab`, `lessons`, `check`, `hint`, `tour`
    course_site       the executed lessons as pages without a kernel
    curves            `draw.curves`: curves of several runs
    dataflow          `draw.dataflow`: a small graph as boxes and arrows
    grading           scores of guesses and answers
    headless          runs one lesson's notebook by papermill
    lesson            Lesson: question, parameters, checkpoints
    moment            the base of views that change something, and answer at once
    recorded_figures  figures measured on GPUs, recorded or live
    saved             `draw.saved`: what the forward saves for the backward
    schemas           JSON Schemas for editors
    scores            a reader's best scores
    whole_course      runs all notebooks, and writes a page of results
"""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.recipe.arguments import add_pairs, count, seconds
from workbench.recipe.hooks import declare_hook
from workbench.recipe.plugins import Command, declare_command

NAMES = {
    "course.lesson": "Lesson load_lesson parameters",
    "course.recorded_figures": "Figures on_gpus",
    "l08_replay_with_cudagraphs.replay_rehearsal": "rehearse",
}
"""What `workbench` has of ours, by module."""
for module, names in NAMES.items():
    for name in names.split():
        declare_hook(f"course.{name}", f"workbench_lessons.{module}:{name}")
for name in ("curves", "dataflow", "saved"):
    declare_hook(f"draw.{name}", f"workbench_lessons.course.{name}:{name}")


def _tour(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser, "--set", "a parameter of the notebook, such as steps=5; may be repeated",
              "KEY=VALUE, such as steps=5")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR",
                        help="folder for the results (default: out)")


def _course(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lessons", nargs="*", metavar="LESSON", help="numbers or names; none: all lessons")
    parser.add_argument("--profile", choices=("laptop", "small", "gpu"), default="laptop",
                        help="laptop: the notebooks' own parameters (default); small: smaller ones; "
                        "gpu: their own, one notebook at a time, so that measurements are undisturbed")
    add_pairs(parser, "--set", "a parameter of a lesson, such as 00_tour.steps=5; may be repeated",
              "LESSON.PARAMETER=VALUE, such as 00_tour.steps=5")
    parser.add_argument("--jobs", type=count, metavar="N", help="notebooks at a time (default: one for two cores)")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write GPU measurements to this folder")
    parser.add_argument("--timeout", type=seconds, default=900.0, metavar="S",
                        help="seconds of one notebook (default 900)")
    parser.add_argument("--out", type=Path, default=Path("out/course"), metavar="DIR",
                        help="folder for the results (default: out/course)")
    parser.add_argument("--site", type=Path, metavar="DIR",
                        help="run nothing: write the lessons as they were executed to this folder, as pages that need "
                        "no kernel and no network")


def _lab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path("course"), metavar="DIR", help="default: course")


def _lessons(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", nargs="?", metavar="LESSON", help="a number or a name: show this lesson alone")


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", metavar="LESSON", help="a number or a name")
    parser.add_argument("--notebook", type=Path, metavar="FILE",
                        help="your copy (default: notebooks/LESSON.ipynb here, or else the package's)")


def _hint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", metavar="LESSON", help="a number or a name")
    parser.add_argument("checkpoint", metavar="NAME", help="a checkpoint, as `workbench lessons` lists it")


COMMANDS = "workbench_lessons.course.commands"
declare_command(Command(
    "tour", "run the tour's notebook and show its verdicts",
    "Run notebooks/00_tour.ipynb from start to end, keep it and its HTML page, and print the verdicts.",
    _tour, f"{COMMANDS}:tour", torch=False,
))
declare_command(Command(
    "course", "run the lessons' notebooks, and write one page of results",
    "Run the notebooks, each in its own process, keep them with their HTML pages, and write index.html. Exit status: "
    "0 all ran, 1 one failed, 2 bad input.",
    _course, f"{COMMANDS}:course", torch=False,
))
declare_command(Command(
    "lab", "copy the notebooks into a folder, and open JupyterLab there",
    "Copy the notebooks and the documents that they link into a folder, and open JupyterLab there. A file that is "
    "there already is kept, and named where it differs.",
    _lab, f"{COMMANDS}:lab", torch=False,
))
declare_command(Command(
    "lessons", "list the lessons, and your scores, or show one", "",
    _lessons, f"{COMMANDS}:lessons", torch=False,
))
declare_command(Command(
    "check", "grade your answers in a notebook",
    "Run a lesson's notebook with your answers in it, and show each checkpoint's score. Exit status: 0 all passed, "
    "1 not all, 2 bad input.",
    _check, f"{COMMANDS}:check", torch=False,
))
declare_command(Command(
    "hint", "the next hint for a checkpoint", "",
    _hint, f"{COMMANDS}:hint", torch=False,
))
