"""Figures of GPUs: measured where they are, recorded elsewhere, and never made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from workbench import WorkbenchError, load_lesson, on_gpus
from workbench_lessons.course import recorded_figures

LESSON = load_lesson("00_tour")


def measure() -> list[dict[str, Any]]:
    return [{"recipe": "none", "step ms": 12.5}, {"recipe": "bucketed", "step ms": 10}]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(recorded_figures, "results_dir", lambda: tmp_path)
    return tmp_path / "course" / "00_tour.json"


def with_gpus(monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(recorded_figures, "gpus_here", lambda: many)
    monkeypatch.setattr(recorded_figures, "machine", lambda: {"gpus": ["NVIDIA H200"] * many})
    monkeypatch.setattr(recorded_figures, "versions", lambda: {"torch": "2.11.0"})


def test_nothing_is_shown_that_was_not_recorded(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 1)
    found = on_gpus(LESSON, "steps", measure, gpus=2)
    assert found.rows == () and found.note.startswith("not recorded yet, and measuring it needs 2 GPUs: workbench ")


def test_measured_and_recorded_and_shown_again(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 4)
    monkeypatch.setenv("WORKBENCH_RECORD", str(results.parent))
    here = on_gpus(LESSON, "steps", measure, gpus=2)
    on_gpus(LESSON, "bytes", measure)  # a second one goes into the same file
    assert here.note == "measured here, on 4 NVIDIA H200, torch 2.11.0"
    date = json.loads(results.read_text())["steps"]["date"]
    with_gpus(monkeypatch, 0)
    there = on_gpus(LESSON, "steps", lambda: pytest.fail("measured without a GPU"), gpus=2)
    assert there.rows == here.rows
    assert repr(there).splitlines()[2:] == ["none         12.5", "bucketed       10",
                                            f"recorded on 4 NVIDIA H200, torch 2.11.0, {date}"]


def test_a_file_that_is_no_record_is_named(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    results.parent.mkdir()
    results.write_text("{")
    with pytest.raises(WorkbenchError, match=f"^{results}: not recorded figures"):
        on_gpus(LESSON, "steps", measure)
