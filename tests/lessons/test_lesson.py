"""Lessons: strict, parameters checked, guesses and answers scored."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from workbench.errors import WorkbenchError
from workbench.notebook.draw.picture import table
from workbench_lessons.course.grading import CheckResult, Prediction, closeness, grade
from workbench_lessons.course.lesson import (
    Lesson,
    LessonError,
    lesson_file,
    lesson_names,
    load_lesson,
    parameters,
)
from workbench_lessons.course.scores import load_scores, take_hint

GOOD = """
name = "l"
title = "T"
question = "Q?"
about = "A"
learn = ["x"]
minutes = 5
key_points = ["k"]
[parameters.steps]
type = "int"
default = 20
min = 2
max = 100
[parameters.lr]
type = "float"
default = 1e-3
min = 0
[parameters.kind]
type = "str"
default = "a"
choices = ["a", "b"]
[profiles.small]
steps = 3
[[questions]]
name = "gathers"
ask = "How many?"
[[checkpoints]]
name = "sum"
task = "Add up."
hints = ["one", "two"]
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    path = tmp_path / "l.toml"
    path.write_text(GOOD)
    return load_lesson(path)


def error_of(call: Callable[..., Any], *args: Any, **values: Any) -> str:
    with pytest.raises(LessonError) as caught:
        call(*args, **values)
    return str(caught.value)


def test_the_lessons() -> None:
    lessons = {name: load_lesson(name) for name in lesson_names()}
    assert len(lessons) == 20
    for name, lesson in lessons.items():
        assert lesson.name == name and lesson.question in lesson._repr_markdown_()
        assert parameters(lesson).model_dump() == {k: p.default for k, p in lesson.parameters.items()}
        assert parameters(lesson, **lesson.profiles["small"]) != parameters(lesson)
        # that each solution passes, and that the task fails as shipped, is tested by the notebook
        text = lesson_file(name).with_name("solution.py").read_text()
        solved = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
        assert solved == {point.name for point in lesson.checkpoints}
        assert all(point.reacts for point in lesson.checkpoints), name
    hard = [any(point.difficulty == "hard" for point in each.checkpoints) for each in lessons.values()]
    assert min(sum(hard[:9]), sum(hard[9:])) >= 3


def test_bad_input_word_for_word(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    for old, new, message in (
            ("default = 20", "default = 1", "parameters.steps: Input should be greater than or equal to 2, got 1"),
            ("steps = 3", "step = 3", "profiles.small.step: unknown key; did you mean 'steps'?"),
            ("[[checkpoints]]", '[[questions]]\nname = "gathers"\nask = "Again?"\n[[checkpoints]]',
             "questions: 'gathers' occurs twice: give each its own name")):
        path.write_text(GOOD.replace(old, new))
        assert error_of(load_lesson, path) == f"{path}: {message}"


def test_names_that_are_not_there_and_all_problems_of_parameters_at_once(lesson: Lesson) -> None:
    assert error_of(load_lesson, "00_tuor") == "lesson '00_tuor': no lesson of this name; did you mean '00_tour'?"
    assert error_of(lesson.predict, "gather") == "lesson 'l': questions: no question 'gather'; did you mean 'gathers'?"
    assert error_of(lesson.check, "x", 1) == "lesson 'l': checkpoints: no checkpoint 'x'; known: sum"
    problems = error_of(parameters, lesson, steps="3", lr=True, kind="c", step=1).splitlines()
    assert problems == [f"lesson 'l': parameters.{line}" for line in (
        "steps: Input should be a valid integer, got text '3'", "lr: Input should be a valid number, got true",
        "kind: Input should be 'a' or 'b', got text 'c'", "step: unknown key; did you mean 'steps'?")]
    assert "less than or equal to 100, got 101" in error_of(parameters, lesson, steps=101)


def test_predict_keeps_the_first_guess(lesson: Lesson) -> None:
    assert str(lesson.predict("gathers")) == "How many? no guess"
    guess = lesson.predict("gathers", 12)
    assert (str(guess), guess.points) == ("How many? guessed 12", None)
    assert lesson.predict("gathers", 10) is guess
    assert str(guess.score(10)) == "How many? guessed 12, it is 10, score 83%"
    assert str(Prediction("Which?").score("a")) == "Which? no guess, it is a"


def test_closeness() -> None:
    pairs = (20, 10), (-5, 10), (0, 0), (float("inf"), 3), ("A  b", "a b"), (True, 1)
    assert [closeness(guess, truth) for guess, truth in pairs] == [0.5, 0, 1, 0, 1, 0]


def test_check_gives_hints_in_steps(lesson: Lesson) -> None:
    assert str(lesson.check("sum", None, truth=100)) == "sum: 0%, to do: Add up."
    assert str(lesson.check("sum", 50, truth=100)) == "sum: 50%, too low"
    assert str(lesson.check("sum", 50, truth=100)) == "sum: 50%, too low\nhint 1: one"
    assert lesson.check("sum", 120, truth=100).hints == ("one", "two")
    assert str(lesson.check("sum", 98, truth=100)) == "sum: 100%, right"


def test_a_hint_reacts_to_how_an_answer_was_wrong(lesson: Lesson) -> None:
    point = lesson.checkpoints[0].model_copy(update={"reacts": {"too high": "some do not count"}})
    reacting = lesson.model_copy(update={"checkpoints": (point,)})
    for answer, hints in ((120, ()), (50, ("one",)), (120, ("some do not count", "one")), (50, ("one", "two"))):
        assert reacting.check("sum", answer, truth=100).hints == hints


def test_exact_gives_nothing_for_nearness() -> None:
    for answer, truth, message in (
            ("9,216", 9216, "right"), (17, 18, "too low"), ("many", 18, "not 'many'"), ("Mul", "mul", "right"),
            ("div", "mul", "not 'div'"), ({"a": 1, "b": 1_000}, {"a": 1, "b": 0}, "b: 1,000, wanted 0"),
            ({"a": 1}, {"a": 1}, "right")):
        assert grade("exact", answer, {"truth": truth})[:2] == (float(message == "right"), message)
    assert str(Prediction("n?", "141", exact=True).score(141)) == "n? guessed 141, it is 141: right"
    assert str(Prediction("n?", 120, exact=True).score(141)) == "n? guessed 120, it is 141: too low"


def test_an_answer_and_its_evidence_are_folded_until_one_guesses() -> None:
    shown = table("seven", ("n",), [(7,)])
    folded = Prediction("n < 9?").score(7, shown)
    page = folded._repr_html_()
    assert page.startswith("<details><summary>n &lt; 9?") and page.partition("</summary>")[2].count("it is 7") == 1
    assert page.endswith(f"{shown._repr_html_()}</div></details>")
    assert Prediction("n?", 6).score(7, shown)._repr_html_().startswith("<div>n? guessed 6, it is 7")


def test_a_result_draws_its_score_and_its_figures_and_100_percent_only_where_it_passed() -> None:
    assert str(CheckResult("bytes", 0.9999, "too low")) == "bytes: 99%, too low"
    assert "100%" not in CheckResult("bytes", 0.9999, "")._drawing() and "100%" in str(CheckResult("bytes", 1, ""))
    wrong = CheckResult("n", 0.75, "n 4", ("less",), (("n<1", 4, 2), ("m", 1, 1)))
    assert wrong._repr_html_().startswith("<div>n: 75%, n 4</div><div>hint 1: less</div><img alt=")
    bars = ElementTree.fromstring(wrong._drawing()).findall("{*}rect")
    assert [bar.get("width") for bar in bars if bar.get("fill") == "#7a8793"] == ["270", "360", "360"]


def test_scores_are_kept(lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine" / "scores.json"
    monkeypatch.setenv("WORKBENCH_SCORES", str(path))
    assert load_scores() == {}
    lesson.check("sum", None, truth=100)
    assert not path.exists()  # not tried
    for answer in (50, 98, 60):
        lesson.check("sum", answer, truth=100)
    assert load_scores() == {"l": {"sum": {"score": 1.0}}}
    assert [take_hint("l", "sum", 2) for _ in range(3)] == [1, 2, 2]
    path.write_text('{"l": 3}')
    with pytest.raises(WorkbenchError) as caught:
        lesson.check("sum", 50, truth=100)
    assert str(path) in str(caught.value) and "remove it, or set WORKBENCH_SCORES" in str(caught.value)
    monkeypatch.setenv("WORKBENCH_SCORES", "")
    assert take_hint("l", "sum", 2) == 2  # with no file to count in, there is no next one


def test_graders() -> None:
    assert grade("workbench_lessons.course.grading:exact", 100, {"truth": 100}) == (1.0, "right", ())
    assert grade("targets", {"n": 4, "m": 1}, {"at_most": {"n": 2, "m": 1}}) == (
        0.75, "n 4, wanted at most 2", (("n", 4, 2), ("m", 1, 1)))
    assert grade("targets", {"n": 2, "m": 0}, {"at_most": {"n": 2, "m": 0}})[:2] == (1.0, "every target met")
    assert grade("targets", {"n": 3}, {"at_most": {"n": 0}})[0] == 0
    limits = {"at_most": {"n": 2, "m": 1}, "start": {"n": 6, "m": 1}}
    given = [grade("targets", {"n": n, "m": m}, limits)[0] for n, m in ((6, 1), (8, 0), (4, 1), (4, 2), (2, 2), (2, 1))]
    assert given == [0.0, 0.0, 0.5, 0.25, 0.5, 1.0]  # as shipped, worse, half the way; what was met must stay met
    assert grade("targets", {"n": 4, "m": 2}, {**limits, "start": {"n": 6}})[0] == 0.25  # m met its limit as shipped
    for check in ("odd", "workbench_lessons.course.grading:nothing", "workbench_lessons.nowhere:nothing"):
        with pytest.raises(WorkbenchError, match=f"check '{check}': .*: give one of close, exact, targets, or"):
            grade(check, 3, {})
