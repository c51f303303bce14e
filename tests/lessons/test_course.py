"""The course and the tour without a browser: notebooks and pages, a failing cell, scores, and bad input."""

import json
import os
import time
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.pipeline.progress import PROGRESS, REPORTS
from workbench_lessons.course.commands import copy_course, what_next
from workbench_lessons.course.lesson import lesson_names, load_lesson
from workbench_lessons.course.scores import keep_score, load_scores
from workbench_lessons.course.whole_course import run_course

pytestmark = pytest.mark.integration
CHECK = """
from workbench import load_lesson
lesson = load_lesson("00_tour")
lesson.check("save_less", {"bytes": max(0, 500_000 - 250_000)}, most={"bytes": 0})
lesson.check("unnoticed", {"loss": 0.0, "first loss": 0.0, "cosine": 0.5, "failed": []})"""
ASK = "from ipywidgets import interact\n@interact(n=3)\ndef ask(n):\n    print('asked', n)"
RUN = """
from workbench import load_recipe, run
recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": dp_shard, "model.n_layers": 1})
report = run(recipe, world="fake")
report"""


def notebook(folder: Path, *cells: str) -> None:
    written = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "source": source, "outputs": [],
                "execution_count": None} for i, source in enumerate(["dp_shard = 2\nsteps = 20\ntp = 2", *cells])]
    written[0]["metadata"] = {"tags": ["parameters"]}
    whole = {"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "00_tour.ipynb").write_text(json.dumps(whole))


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("WORKBENCH_NOTEBOOKS", str(folder))
    monkeypatch.setenv("WORKBENCH_SCORES", str(tmp_path / "scores.json"))
    monkeypatch.delenv(REPORTS, raising=False)
    return folder


def test_one_page_of_what_ran_and_what_failed(notebooks, tmp_path, capsys):
    notebook(notebooks, ASK)
    (notebooks / "00_tour.ipynb").rename(notebooks / "02_capture_a_joint_graph.ipynb")
    notebook(notebooks, "done = 1", "# half way\nraise ValueError('a bad <cell>')", "never = 1")
    out = tmp_path / "out"
    assert main(["course", "0", "02", "--jobs", "2", "--out", str(out)]) == 1
    shown, said = capsys.readouterr()
    assert shown == f"results: {out / 'index.html'}\n"
    assert "02_capture_a_joint_graph: done (" in said and "Traceback" not in said
    assert "code cell 4 failed, which starts `# half way`" in said and "ValueError: a bad <cell>" in said
    assert "ValueError" in (out / "00_tour.ipynb").read_text()  # the notebook up to there is kept
    page = (out / "index.html").read_text()
    assert '<a href="00_tour.ipynb">' in page and "a bad &lt;cell&gt;" in page
    assert {path.name for path in out.glob("*.html")} == {"02_capture_a_joint_graph.html", "index.html"}
    cells = json.loads((out / "02_capture_a_joint_graph.ipynb").read_text())["cells"]
    # nbclient would keep it in an Output widget, and may wait for ever while it does
    assert [o["text"] for o in cells[-1]["outputs"] if o["output_type"] == "stream"] == [["asked 3\n"]]


@pytest.mark.nightly
def test_a_run_over_its_limit_is_ended(notebooks, tmp_path):
    pid = tmp_path / "pid"
    notebook(notebooks, f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    found, = run_course(["00_tour"], tmp_path / "out", timeout=12)
    assert found.problem == "not done after 12 s: give it more with --timeout"
    for _ in range(100):
        if not Path(f"/proc/{pid.read_text()}").exists():
            return
        time.sleep(0.1)
    pytest.fail("the kernel was left behind")


def test_bad_input_before_the_first_cell(notebooks, tmp_path, capsys):
    out = tmp_path / "out"
    for command, *messages in (
            (["course", "00", "--set", "00_tour.tp=3"],
             "lesson '00_tour': parameters.tp: Input should be 1, 2 or 4, got 3"),
            (["course", "00", "--set", "02.world_size=16"],
             "--set 02.world_size=16: write LESSON.PARAMETER=VALUE, of a lesson of this run, such as 00_tour.steps=5"),
            (["tour", "--set", "stepz=3", "dp_shard=3"],
             "lesson '00_tour': parameters.dp_shard: Input should be 2 or 4, got 3",
             "lesson '00_tour': parameters.stepz: unknown key; did you mean 'steps'?")):
        assert main([*command, "--out", str(out)]) == 2 and not out.exists()
        assert capsys.readouterr().err.splitlines() == [f"workbench: error: {message}" for message in messages]


@pytest.mark.nightly
def test_check_hint_and_lessons(notebooks, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the notebooks are a reader's copy
    notebook(notebooks, CHECK)
    assert main(["check", "0"]) == 1
    assert capsys.readouterr().out == "save_less: 0% (workbench hint 00 save_less)\nunnoticed: 100%\n"
    mine = tmp_path / "mine.ipynb"
    own = (notebooks / "00_tour.ipynb").read_text().replace("steps = 20", "steps = 7")
    mine.write_text(own.replace("500_000", "500_000 if steps != 7 else 200_000"))
    assert main(["check", "00_tour", "--notebook", str(mine)]) == 0  # with the reader's own parameters
    assert capsys.readouterr().out == "save_less: 100%\nunnoticed: 100%\n"
    hints = load_lesson("00_tour").checkpoint("save_less").hints
    for many in (*range(1, len(hints) + 1), len(hints)):
        assert main(["hint", "0", "save_less"]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [
            f"hint {i} of {len(hints)}: {hint}" for i, hint in enumerate(hints[:many], 1)]
    assert main(["hint", "13", "winds"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["this checkpoint has no hints"]
    assert main(["lessons"]) == 0
    assert "[100%] save_less (medium, 6 min): " in capsys.readouterr().out


def test_a_notebook_that_cannot_be_graded_is_no_wrong_answer(notebooks, tmp_path, capsys):
    notebook(notebooks)
    given = tmp_path / "given.ipynb"
    other = (notebooks / "00_tour.ipynb").read_text()
    for text, says in (("{}", "is not a Jupyter notebook"),
                       (other, "checks nothing of lesson '00_tour': is it that of another")):
        given.write_text(text)
        assert main(["check", "0", "--notebook", str(given)]) == 2
        assert says in capsys.readouterr().err and not load_scores().get("00_tour")


def test_what_is_nearly_right_comes_next_and_what_is_passed_does_not(notebooks, capsys):
    known = [load_lesson(name) for name in lesson_names()]
    for point in known[0].checkpoints:
        keep_score(known[0].name, point.name, 1.0)
    point = known[1].checkpoints[0]
    keep_score(known[1].name, point.name, 0.999)
    assert main(["lessons"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"next: lesson 00, checkpoint {point.name} ({point.difficulty}, ")
    assert any(line.startswith(f"  [99%] {point.name} ({point.difficulty}, ") for line in lines)
    scores = {lesson.name: {point.name: {"score": 1.0} for point in lesson.checkpoints} for lesson in known}
    assert what_next(known, scores) == f"next: nothing: all {sum(map(len, scores.values()))} checkpoints are passed"


def test_a_copy_of_the_course_keeps_what_a_reader_has_changed(tmp_path, monkeypatch, capsys):
    assert copy_course(tmp_path) == []
    mine = tmp_path / "notebooks/00_tour.ipynb"
    shipped = mine.read_bytes()
    mine.write_bytes(b"mine")
    (tmp_path / "docs/glossary.md").unlink()
    assert copy_course(tmp_path) == [mine]
    assert mine.read_bytes() == b"mine" and len(shipped) > 10_000 and (tmp_path / "docs/glossary.md").is_file()
    monkeypatch.setattr("workbench_lessons.course.commands.find_spec", lambda name: None)
    assert main(["lab", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "workbench: error: lab: JupyterLab is not installed: pip install jupyterlab\n"


@pytest.mark.nightly
def test_a_tour_leaves_its_notebook_its_page_and_its_verdicts(notebooks, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv(PROGRESS)
    notebook(notebooks, RUN)
    out = tmp_path / "out"
    assert main(["tour", "--set", "dp_shard=4", "--out", str(out)]) == 0
    shown, progress = capfd.readouterr()
    assert "llama3_fsdp on 4 fake ranks (dp_shard 4), level light" in shown
    assert progress.splitlines()[-2:] == ["workbench: 00_tour, cell 1", "workbench: 00_tour, cell 2"]
    cells = json.loads((out / "00_tour.ipynb").read_text())["cells"]
    assert "dp_shard = 4" in "".join(cells[1]["source"])
    assert [o["output_type"] for o in cells[2]["outputs"]] == ["execute_result"]  # no progress
    assert "IPKernelApp" not in progress and not {REPORTS, PROGRESS} & set(os.environ)


def test_a_cell_that_exits_is_a_failing_cell(notebooks, tmp_path, capsys):
    notebook(notebooks, "import sys\nsys.exit(0)", "print('not reached')")
    assert main(["tour", "--out", str(tmp_path / "out")]) == 1
    assert "00_tour.ipynb: code cell 3 failed, which starts `import sys`\nSystemExit: 0\n" in capsys.readouterr().err
