"""Odd lessons, parameters, guesses, answers and scores: each is taken, or is refused with its file and key."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import strategies as st
from odd import (
    damaged,
    edited,
    edits,
    holds,
    is_a_sentence,
    json_values,
    python_values,
    scalars,
    toml_values,
    words,
)

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.notebook.lessons.headless import from_text
from workbench.notebook.lessons.lesson import lesson_file, lesson_names, load_lesson, parameters
from workbench.notebook.lessons.scores import SCORES, keep_score, load_scores, take_hint

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

FILES = {name: lesson_file(name).read_bytes() for name in lesson_names()}
TABLES = {name: tomllib.loads(text.decode()) for name, text in FILES.items()}
LESSONS = {name: load_lesson(name) for name in FILES}
names = st.sampled_from(sorted(FILES))
SCORED = {"00_tour": {"a": {"score": 0.5, "hints": 1}}, "02_capture_a_joint_graph": {"b": {"score": 1.0}}}


def test_a_lesson_with_odd_values_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"

    def check(text: bytes) -> None:
        path.write_bytes(text)
        try:
            lesson = load_lesson(path)
        except WorkbenchError as error:
            assert str(error).startswith(str(path))
            is_a_sentence(str(error))
            return
        assert lesson._repr_markdown_() and repr(lesson) and lesson.needed

    holds(5000, check, st.one_of(
        st.builds(lambda name, changes: tomli_w.dumps(edited(TABLES[name], changes)).encode(), names,
                  edits(toml_values)),
        names.flatmap(lambda name: damaged(FILES[name]))))


def test_parameters_are_taken_or_refused_by_name() -> None:
    def check(name: str, where: int, value: Any, key: str, text: str) -> None:
        lesson = LESSONS[name]
        known = sorted(lesson.parameters)
        key = known[where % len(known)] if where and known else key
        for values in ({key: value}, from_text(name, {key: text})):
            try:
                found = parameters(lesson, **values).model_dump()
            except WorkbenchError as error:
                is_a_sentence(str(error), name, f"parameters.{key}")
            else:
                assert found[key] == values[key] and set(found) == set(known)

    holds(5000, check, names, st.integers(0, 20), st.one_of(python_values, json_values), words,
          st.one_of(words, scalars.map(json.dumps), st.sampled_from(["[" * 9999, "9" * 5000, "1\na = 2"])))


def test_odd_scores_are_read_or_refused_and_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scores.json"
    monkeypatch.setenv(SCORES, str(path))

    def check(text: bytes) -> None:
        path.write_bytes(text)
        for act in (load_scores, lambda: keep_score("00_tour", "a", 0.7), lambda: take_hint("00_tour", "a", 3)):
            before = path.read_bytes()
            try:
                act()
            except WorkbenchError as error:
                is_a_sentence(str(error), str(path))
                assert path.read_bytes() == before
        status = main(["lessons"])
        assert status in (0, 2) and status == 2 * bool(capsys.readouterr().err)

    holds(5000, check, st.one_of(
        edits(json_values).map(lambda changes: json.dumps(edited(SCORED, changes)).encode()),
        damaged(json.dumps(SCORED).encode()), st.sampled_from([b"[" * 99_999, b"9" * 5000, b"null", b"3", b"\xff"])))
