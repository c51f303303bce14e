"""Lesson: the question, parameters, predictions and graded checkpoints of one notebook, declared in TOML.

Read by the same strict loader as recipes. No torch here.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, PositiveInt, PrivateAttr, create_model, model_validator

from workbench.recipe.files import course_folder
from workbench.recipe.strict_toml import (
    DeclarationError,
    Declared,
    Problem,
    check,
    files_in,
    find_file,
    read_toml,
    suggestion,
)
from workbench_lessons.course.grading import CheckResult, Prediction, grade
from workbench_lessons.course.scores import keep_score

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


class LessonError(DeclarationError):
    """An invalid lesson, parameter, or name of a question or checkpoint: every problem with its key."""


class Parameter(Declared):
    """One papermill parameter: its type, default, and allowed values."""

    type: Literal["int", "float", "str", "bool"]
    default: int | float | str | bool
    about: str = ""
    min: float | None = None
    max: float | None = None
    choices: tuple[int | float | str, ...] = ()

    def field(self) -> tuple[Any, Any]:
        """What pydantic checks of a value, and the default."""
        kind: Any = Literal[self.choices] if self.choices else _TYPES[self.type]
        return kind, Field(self.default, ge=self.min, le=self.max)


class Checkpoint(Declared):
    """A graded task. `check` is close, exact or targets, or "workbench_lessons.module:function"."""

    name: str = Field(min_length=1)
    task: str = Field(min_length=1)
    check: str = Field("close", pattern=r"^(\w+|workbench(_lessons)?(\.\w+)+:\w+)$")
    hints: tuple[str, ...] = Field(description="in order; none in an examination")
    reacts: dict[str, str] = Field(
        default_factory=dict, description="hints by words of the grader's message"
    )
    minutes: PositiveInt = Field(5, description="effort")
    difficulty: Literal["easy", "medium", "hard"] = "medium"


class Question(Declared):
    """A question that the reader answers by a guess before the notebook shows the answer."""

    name: str = Field(min_length=1)
    ask: str = Field(min_length=1)
    exact: bool = Field(
        False, description="a guess is right or wrong; else it scores its closeness"
    )


class Exhibit(Declared):
    """An exhibit of the bug museum: a real bug, in the smallest graph that has it."""

    name: str = Field(min_length=1)
    bug: str = Field(min_length=1, description="the fault, in a sentence")
    seen: str = Field(
        min_length=1, description="where it occurred: project and version, pull request or issue"
    )
    verdict: str = Field(min_length=1, description="the verdicts, as the cell prints them")
    caught: str = Field(min_length=1, description="what would have caught it")


Named = TypeVar("Named", Question, Checkpoint)


class Lesson(Declared):
    """One notebook's declaration; see `load_lesson`."""

    format_version: Literal[1] = 1
    name: str = Field(min_length=1)
    title: str = Field(min_length=1)
    question: str = Field(min_length=1)
    about: str = Field(min_length=1, description="what the reader will do")
    learn: tuple[str, ...] = Field(min_length=1)
    need: tuple[str, ...] = Field((), description="what the reader should know already")
    minutes: PositiveInt
    parameters: dict[str, Parameter] = Field(default_factory=dict)
    profiles: dict[Literal["small"], dict[str, int | float | str | bool]] = Field(
        default_factory=dict, description="values of parameters; small is the smallest run")
    questions: tuple[Question, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    museum: tuple[Exhibit, ...] = ()
    key_points: tuple[str, ...] = Field(min_length=1)

    _attempts: dict[str, int] = PrivateAttr(default_factory=dict)
    _guesses: dict[str, Prediction] = PrivateAttr(default_factory=dict)

    def model(self) -> type[Declared]:
        """What checks values of the parameters: one field each."""
        fields: Any = {name: parameter.field() for name, parameter in self.parameters.items()}
        return create_model("Parameters", __base__=Declared, **fields)

    @model_validator(mode="after")
    def _rules(self) -> Self:
        model = self.model()
        defaults = {name: parameter.default for name, parameter in self.parameters.items()}
        problems = check(model, defaults, "parameters")[1]
        for profile, values in self.profiles.items():
            problems += check(model, values, f"profiles.{profile}")[1]
        for where in ("checkpoints", "questions", "museum"):
            names = [entry.name for entry in getattr(self, where)]
            problems += [Problem(where, f"{name!r} occurs twice: give each its own name")
                         for name, count in Counter(names).items() if count > 1]
        if problems:
            raise LessonError(f"lesson {self.name!r}", problems)
        return self

    def predict(self, name: str, guess: Any = None) -> Prediction:
        """Record the reader's guess before the answer is shown; score it with `.score(truth)`.

        A second guess does not replace the first. Raises LessonError for a question that is not declared.
        """
        asked = self._declared(self.questions, "question", name)
        known = self._guesses.get(name)
        if known is None or known.guess is None:
            self._guesses[name] = Prediction(asked.ask, guess, exact=asked.exact)
        return self._guesses[name]

    def check(self, name: str, answer: Any, **context: Any) -> CheckResult:
        """Grade an answer, from 0 to 1. `context` goes to the grader.

        The first wrong answer is graded alone: a notebook shows it as shipped. Each further one shows the hints that
        react to its message, or one hint more.

        Raises LessonError for a checkpoint that is not declared. `None` means that the task was not tried yet.
        """
        point = self.checkpoint(name)
        if answer is None:
            return CheckResult(name, 0.0, f"to do: {point.task}")
        score, message, figures = grade(point.check, answer, context)
        keep_score(self.name, name, score)
        if score >= 1:
            return CheckResult(name, 1.0, message, figures=figures)
        tried = self._attempts[name] = self._attempts.get(name, 0) + 1
        reactions = (
            [hint for words, hint in point.reacts.items() if words in message] if tried > 1 else []
        )
        return CheckResult(
            name, score, message, (*reactions, *point.hints[: tried - 1 - bool(reactions)]), figures
        )

    def checkpoint(self, name: str) -> Checkpoint:
        """The checkpoint of this name. LessonError where there is none."""
        return self._declared(self.checkpoints, "checkpoint", name)

    def _declared(self, declared: tuple[Named, ...], noun: str, name: str) -> Named:
        by_name = {item.name: item for item in declared}
        if name not in by_name:
            problem = Problem(f"{noun}s", f"no {noun} {name!r}" + suggestion(name, by_name))
            raise LessonError(f"lesson {self.name!r}", [problem])
        return by_name[name]

    def __repr__(self) -> str:
        return f"Lesson {self.name}: {self.title}"

    def _repr_markdown_(self) -> str:
        lines = [f"## {self.title}", f"**{self.question}**", self.about,
                 f"*{self.minutes} minutes*"]
        for title, entries in (("You will learn", self.learn), ("You need", self.need)):
            if entries:
                lines.append("\n".join([f"{title}:", *(f"- {entry}" for entry in entries)]))
        return "\n\n".join(lines)


def parameters(lesson: Lesson, **values: Any) -> Any:
    """The checked values of the notebook's parameters cell, one attribute each; absent ones take the default.

    Raises LessonError with all problems: undeclared names, wrong types, values out of range.
    """
    checked, problems = check(lesson.model(), values, "parameters")
    if problems:
        raise LessonError(f"lesson {lesson.name!r}", problems)
    return checked


def lessons_dir() -> Path:
    """Where lessons are found by name: $WORKBENCH_LESSONS, or those of the package."""
    return Path(os.environ.get("WORKBENCH_LESSONS") or course_folder(""))


def lesson_names() -> list[str]:
    """The names of all lessons, in order; LessonError where there is no folder of them."""
    missing = "no such folder of lessons: set WORKBENCH_LESSONS to one"
    files = files_in(lessons_dir(), "l*/lesson.toml", LessonError, missing)
    return [path.parent.name.removeprefix("l") for path in files]


def lesson_file(name: str) -> Path:
    """Where the lesson of this name is declared: `lNAME/lesson.toml` in `lessons_dir()`."""
    return lessons_dir() / f"l{name}" / "lesson.toml"


def lesson_named(text: str) -> str:
    """A lesson's name from its number or its name: "2" and "02" are 02_capture_a_joint_graph."""
    return next((name for name in lesson_names() if name.split("_")[0] == text.zfill(2)), text)


def load_lesson(name_or_path: str | os.PathLike[str]) -> Lesson:
    """Read a lesson by name or by path. LessonError lists every problem with file and key."""
    path = find_file(name_or_path, "lesson", lesson_file, lesson_names, LessonError)
    lesson, problems = check(Lesson, read_toml(path, LessonError))
    if lesson is None:
        raise LessonError(str(path), problems)
    return lesson
