"""Notebooks without a browser: parameters are checked before the first cell, a failing cell is named and kept."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import main
from workbench.pipeline.progress import PROGRESS, REPORTS
from workbench_lessons.course.headless import run_lesson

pytestmark = pytest.mark.integration

RUN = """
from workbench import load_recipe, run
recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": dp_shard, "model.n_layers": 1})
report = run(recipe, world="fake")
report"""


def notebook(folder: Path, *cells: str) -> None:
    tags = [["parameters"], *([] for _ in cells)]
    made: list[dict[str, Any]] = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": tag}, "source": source, "outputs": [],
         "execution_count": None}
        for i, (tag, source) in enumerate(zip(tags, ["dp_shard = 2\nsteps = 20\ntp = 2", *cells], strict=True))
    ]
    whole = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "00_tour.ipynb").write_text(json.dumps(whole))


@pytest.fixture
def notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.setenv("WORKBENCH_NOTEBOOKS", str(folder))
    monkeypatch.delenv(REPORTS, raising=False)
    return folder


@pytest.mark.nightly
def test_a_tour_leaves_its_notebook_its_page_and_its_verdicts(
    notebooks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PROGRESS)
    notebook(notebooks, RUN)
    out = tmp_path / "out"
    assert main(["tour", "--set", "dp_shard=4", "--out", str(out)]) == 0
    shown, progress = capfd.readouterr()
    assert "llama3_fsdp on 4 fake ranks (dp_shard 4), level light" in shown
    assert f"executed notebook: {out / '00_tour.ipynb'}\n" in shown
    assert progress.splitlines()[-2:] == ["workbench: 00_tour, cell 1", "workbench: 00_tour, cell 2"]
    cells = json.loads((out / "00_tour.ipynb").read_text())["cells"]
    assert "dp_shard = 4" in "".join(cells[1]["source"])
    assert [o["output_type"] for o in cells[2]["outputs"]] == ["execute_result"]  # no progress
    assert "llama3_fsdp on 4 fake ranks" in (out / "00_tour.html").read_text()
    assert "IPKernelApp" not in progress and not {REPORTS, PROGRESS} & set(os.environ)


def test_wrong_parameters_are_refused_before_the_first_cell(
    notebooks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(notebooks, f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["tour", "--set", "stepz=3", "dp_shard=3", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "workbench: error: lesson '00_tour': parameters.dp_shard: Input should be 2 or 4, got 3",
        "workbench: error: lesson '00_tour': parameters.stepz: unknown key; did you mean 'steps'?"]
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_a_cell_that_exits_is_a_failing_cell(
    notebooks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(notebooks, "import sys\nsys.exit(0)", "print('not reached')")
    assert main(["tour", "--out", str(tmp_path / "out")]) == 1
    assert "00_tour.ipynb: code cell 3 failed, which starts `import sys`\nSystemExit: 0\n" in capsys.readouterr().err


def test_what_interact_shows_is_the_cells_output(notebooks: Path, tmp_path: Path) -> None:
    """nbclient would keep it in an Output widget, and may wait for ever while it does."""
    notebook(notebooks, "from ipywidgets import interact\n@interact(n=3)\ndef ask(n):\n    print('asked', n)")
    run_lesson("00_tour", {}, tmp_path / "out")
    cells = json.loads((tmp_path / "out" / "00_tour.ipynb").read_text())["cells"]
    assert [o["text"] for o in cells[-1]["outputs"] if o["output_type"] == "stream"] == [["asked 3\n"]]
