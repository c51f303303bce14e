"""`workbench lessons`: how far a reader is, and what to do next, from scores that the tests seed."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from workbench.cli import main
from workbench.notebook.lessons.commands import what_next
from workbench.notebook.lessons.lesson import lesson_names, load_lesson
from workbench.notebook.lessons.scores import SCORES, keep_score

LESSONS = [load_lesson(name) for name in lesson_names()]


@pytest.fixture
def told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SCORES, str(tmp_path / "scores.json"))

    def told():
        assert main(["lessons"]) == 0
        return capsys.readouterr().out.splitlines()

    return told


def test_what_is_nearly_right_comes_next_and_what_is_passed_does_not(told):
    for point in LESSONS[0].checkpoints:
        keep_score("00_tour", point.name, 1.0)
    point, later = LESSONS[1].checkpoints[0], LESSONS[2].checkpoints[0]
    keep_score(LESSONS[1].name, point.name, 0.999)
    keep_score(LESSONS[2].name, later.name, 1.0)
    lines = told()
    assert lines[-1].startswith(f"next: lesson 01, checkpoint {point.name} ({point.difficulty}, ")
    assert any(line.startswith(f"  [99%] {point.name} ({point.difficulty}, ") for line in lines)
    keep_score(LESSONS[1].name, point.name, 1.0)
    assert told()[-1].startswith(f"next: lesson 01, checkpoint {LESSONS[1].checkpoints[1].name} ")


def test_when_all_is_passed_it_says_so(told):
    scores = {lesson.name: {point.name: {"score": 1.0} for point in lesson.checkpoints} for lesson in LESSONS}
    count = sum(map(len, scores.values()))
    assert what_next(LESSONS, scores) == f"next: nothing: all {count} checkpoints are passed"
    scores[LESSONS[-1].name].popitem()
    assert what_next(LESSONS, scores).startswith(f"next: lesson {LESSONS[-1].name[:2]}, checkpoint ")
    assert told()[-1].startswith("next: lesson 00")


def test_it_answers_in_a_second_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv(SCORES, str(tmp_path / "scores.json"))
    code = ("import sys; from workbench.cli import main; main(['lessons']); "
            "assert 'torch' not in sys.modules, 'torch was imported'")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # of the processor: other processes do not count
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
