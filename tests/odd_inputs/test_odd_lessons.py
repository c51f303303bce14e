"""Odd lessons, parameters, guesses, answers and scores: each is taken, or is refused with its file and key."""

from __future__ import annotations

import inspect
import json
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
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
    numbers,
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


def test_set_for_a_course_is_taken_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def run_course(names: Any, out: Any, *, changes: Any, profile: str, **_: Any) -> list[Any]:
        from workbench.notebook.lessons.course import values_of

        ran.append([values_of(load_lesson(name), profile, changes.get(name, {})) for name in names])
        return []

    monkeypatch.setattr("workbench.notebook.lessons.course.run_course", run_course)

    def check(name: str, key: str, text: str) -> None:
        ran.clear()
        try:
            status = main(["course", name, "--set", f"{key}={text}", "--out", str(tmp_path / "out")])
        except SystemExit as error:
            status = error.code  # type: ignore[assignment]
        said = capsys.readouterr().err
        assert status in (0, 2) and (status == 0) == bool(ran)
        if status:
            is_a_sentence(said, "error: ")

    parameter = names.flatmap(lambda name: st.sampled_from([f"{name}.{p}" for p in LESSONS[name].parameters] or [name]))
    holds(2000, check, st.one_of(names, words), st.one_of(parameter, words), st.one_of(
        words, scalars.map(json.dumps)))


def test_any_guess_and_any_answer_is_scored_or_refused() -> None:
    """An answer of another type than the truth is a wrong answer, and no error."""
    tensor = st.sampled_from(["tensor", "array"]).map(lambda kind: _two(kind))

    def check(name: str, where: int, answer: Any, truth: Any) -> None:
        lesson = load_lesson(name)
        for question in lesson.questions:
            assert str(lesson.predict(question.name, answer).score(truth))
        points = lesson.checkpoints
        if not points:
            return
        point = points[where % len(points)]
        context = {"targets": {"at_most": {"bytes": 4.0}}, "first_of": {"truth": "mul", "order": ["mul", "add"]}}.get(
            point.check, {"truth": truth})
        module, _, grader = point.check.partition(":")
        wanted = {"truth"}
        if grader:
            wanted = {*inspect.signature(getattr(import_module(module), grader)).parameters}
        if {"board", "lab", "mesh"} & wanted:
            return  # of a view: tests/lessons/test_graders.py
        if "truth" not in wanted:
            context = _graphs().get(grader, {})  # or it holds the truth
        if point.check.endswith(":calls_of"):
            call = SimpleNamespace(number=1, nodes=("mm",), kind="extern")
            context = {"graph": SimpleNamespace(graph="forward", kernels=[call]), "nodes": {"mm"}}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = lesson.check(point.name, answer, **context)
        except WorkbenchError as error:
            is_a_sentence(str(error), point.name)
            return
        assert 0 <= found.score <= 1 and found.passed == (found.score == 1)
        assert str(found).startswith(point.name) and found._repr_html_()

    holds(5000, check, names, st.integers(0, 5), st.one_of(
        python_values, tensor, st.dictionaries(st.just("bytes"), st.one_of(numbers, json_values, tensor))),
        st.one_of(numbers, words, st.lists(st.integers(0, 3), max_size=2), tensor))


def _graphs() -> dict[str, Any]:
    """What graders take that compute the truth of it: graphs without a node, figures of a trace, collectives."""
    import torch

    from workbench.torch_api.devices.profile import device_spec
    from workbench_lessons.l15_one_graph_for_the_whole_step.whole_steps import Tail

    graph = torch.fx.Graph()
    graph.output(())
    empty = SimpleNamespace(graph=torch.fx.GraphModule({}, graph), gradients={}, trained=())
    gather = SimpleNamespace(kind="all_gather", group_size=2, payload=2**20)
    spec = device_spec("h100")
    south = SimpleNamespace(name="south", options=SimpleNamespace(buckets=("layers.0", "layer.1")))
    return {"named": {"case": ([SimpleNamespace(name="north"), south], SimpleNamespace(graphs=()))},
            "takes_twice": {"spec": spec}, "saves": {"before": [gather, gather], "after": [gather], "spec": spec},
            "hides": {"layer": [gather], "products_ms": 1.0, "tokens": 64, "spec": spec, "within": 0.15},
            "finds_gathered": {"saved": {"g": [SimpleNamespace(name="t", gathered="w")]}, "gathers": {"g": {}}},
            "names": {"owner": {"t": "mm"}, "kinds": {"mm": "an activation"}}, "fall": {"low": 8, "high": 10},
            "counts_casts": {"of": empty.graph},
            "counts_bytes": {"of": SimpleNamespace(before=(empty.graph,), after=(empty.graph,))},
            "counts_inputs": {"of": empty}, "saves_bytes": {"without": empty, "fused": empty},
            "saves_less": {"most": {"bytes": 4}}, "slot_bytes": {
                "experts": 16, "exchange": SimpleNamespace(shape=(192, 128), bytes_in=98304)},
            "count_kept": {"of_graph": None, "refused": {"joint": "", "traced": "no"}, "wanted": [1.0, 2.0]},
            "tips_at": {"size": 1000, "tail": Tail(3, 0.0, 1.0, 0.0, 0.5, 0.5, 0.0, 0.0)}}


def _two(kind: str) -> Any:
    import torch

    return torch.ones(2) if kind == "tensor" else torch.ones(2).numpy()


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
