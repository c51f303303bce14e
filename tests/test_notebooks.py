"""The notebooks as products: executed, small, in step with their lessons; and checks that can fail."""

import ast
import importlib
import itertools
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import papermill
import pytest
from imports import all_imports

from workbench.notebook.views.controls import OwnData
from workbench_lessons.course.lesson import lesson_names, load_lesson

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
LINES, BYTES, VIEW_BYTES = 15, 560_000, 100_000


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def python(cell: dict[str, Any]) -> str:
    """The source without lines for IPython."""
    return "\n".join(line for line in source(cell).splitlines() if not line.startswith("%"))


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def shown(cell: dict[str, Any]) -> str:
    return "".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in cell["outputs"])


def stale_or_large(views: list[dict[str, Any]]) -> list[str]:
    """The views of a notebook that another module draws, or that are too large."""
    return [str(view.get("kind")) for view in views
            if view["_esm"] != OwnData._esm or len(json.dumps(view)) >= VIEW_BYTES]


def test_a_committed_view_is_small_and_draws_with_the_module_of_now() -> None:
    tables = [json.loads(path.read_text(encoding="utf-8"))["metadata"].get("widgets", {}) for path in NOTEBOOKS]
    models = [model["state"] for table in tables for kept in table.values() for model in kept["state"].values()]
    views = [state for state in models if "_esm" in state]
    assert views and stale_or_large(views) == [], "execute the notebook again"
    assert stale_or_large([views[0] | {"_esm": "another"}, views[0] | {"data": "x" * VIEW_BYTES}]) == 2 * [
        views[0].get("kind")]


def committed_as_executed_from_top_to_bottom(path: Path) -> None:
    found = cells(path)
    # nbval compares nothing in a cell without a count
    assert [c["execution_count"] for c in found] == list(range(1, len(found) + 1))
    assert not [o for c in found for o in c["outputs"] if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert path.stat().st_size < BYTES


def cells_are_small_and_the_first_result_is_in_the_third(path: Path) -> None:
    lengths = [len(source(c).splitlines()) for c in cells(path)]
    assert max(lengths) < LINES and statistics.median(lengths) <= 6
    assert [bool(c["outputs"]) for c in cells(path)[:3]] == [False, False, True]


def only_the_workbench_torch_its_widgets_and_the_standard_library_are_imported(path: Path) -> None:
    """And names of the package come from where they are defined."""
    text = "\n".join(map(python, cells(path)))
    assert borrowed_names(text) == []
    names = {name for _, name in all_imports(text)}
    known = {"workbench", "workbench_lessons", "torch", "ipywidgets", "transformers", *sys.stdlib_module_names}
    assert {name for name in names if name.partition(".")[0] not in known} == set()
    assert not [name for name in names if name.startswith("torch._") or "torch_api" in name]


def test_a_lesson_stays_short() -> None:
    for path in NOTEBOOKS:
        text = "\n".join(map(source, cells(path, "markdown")))
        folds = re.findall(r"<details>.*?</details>", text, re.DOTALL)
        folded = sum(len(fold.split()) for fold in folds)
        assert len(text.split()) - folded <= 2_000 and folded <= 700, path.stem
        assert len(cells(path)) + len(cells(path, "markdown")) <= 50, path.stem
        assert sum(len(source(cell).splitlines()) for cell in cells(path)) <= 180, path.stem


def borrowed_names(text: str) -> list[str]:
    """Names that are imported from a module of the package that does not define them."""
    borrowed = []
    for _, name in all_imports(text):
        place, _, last = name.rpartition(".")
        if place.startswith("workbench."):
            home = getattr(getattr(importlib.import_module(place), last), "__module__", place)
            lent = "torch_api" in home or f"{home}.".startswith(f"{place}.")  # a pass lends its transform
            borrowed += [] if lent else [name]
    return borrowed


def test_an_import_from_another_module_is_told() -> None:
    assert borrowed_names("from workbench.graph.lower import ForwardBackward") == [
        "workbench.graph.lower.ForwardBackward"]


def parameters_guesses_checkpoints_and_exhibits_are_those_of_the_lesson(path: Path) -> None:
    lesson = load_lesson(path.stem)
    first, *others = cells(path)
    assert tags(first) == ["parameters"]
    given = papermill.inspect_notebook(str(path))
    assert list(given) == list(lesson.parameters)
    for name, parameter in lesson.parameters.items():
        row = given[name]
        assert (ast.literal_eval(row["default"]), row["inferred_type_name"]) == (parameter.default, parameter.type)
        assert row["help"].startswith(parameter.about)
    exhibits = {tags(c)[1]: shown(c) for c in cells(path) if tags(c)[:1] == ["museum"]}
    assert sorted(exhibits) == sorted(e.name for e in lesson.museum)
    assert all(exhibit.verdict in exhibits[exhibit.name] for exhibit in lesson.museum)
    text = "\n".join(map(source, others))
    assert all(f'lesson.predict("{q.name}", None)' in text for q in lesson.questions)
    checkpoints = {tags(c)[1]: c for c in others if tags(c)[:1] == ["checkpoint"]}
    assert sorted(checkpoints) == sorted(c.name for c in lesson.checkpoints)
    for name, cell in checkpoints.items():  # as shipped it must fail, and give no hint
        assert f'lesson.check("{name}"' in source(cell)
        assert shown(cell).splitlines()[-1].startswith(f"{name}: ")  # the lesson's code may print before it
        assert "100%" not in shown(cell) and "hint" not in shown(cell)


def terms_are_in_the_glossary_and_minutes_are_the_lessons(path: Path) -> None:
    text = "\n".join(map(source, cells(path, "markdown")))
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    found = re.findall(r'^## (?:<a id="([\w-]+)"></a>)?(.+)$', glossary, re.MULTILINE)
    known = {anchor or term.replace(" ", "-") for anchor, term in found}  # as JupyterLab looks for it
    assert known == {term.lower().replace(" ", "-") for _, term in found}  # as GitHub does
    assert set(re.findall(r"glossary\.md#([\w-]+)", text)) <= known
    said = re.findall(r"\*\(?(easy|medium|hard), (\d+) minutes\b", text.lower())
    assert said == [(c.difficulty, str(c.minutes)) for c in load_lesson(path.stem).checkpoints]


def test_there_is_a_notebook_for_each_lesson_and_it_links_to_the_next() -> None:
    assert [p.stem for p in NOTEBOOKS] == lesson_names()
    for path, following in itertools.pairwise(NOTEBOOKS):
        assert f"]({following.name})" in source(cells(path, "markdown")[-1]).splitlines()[-1]


@each_notebook
def test_a_notebook_is_a_product(path: Path) -> None:
    committed_as_executed_from_top_to_bottom(path)
    cells_are_small_and_the_first_result_is_in_the_third(path)
    only_the_workbench_torch_its_widgets_and_the_standard_library_are_imported(path)
    parameters_guesses_checkpoints_and_exhibits_are_those_of_the_lesson(path)
    terms_are_in_the_glossary_and_minutes_are_the_lessons(path)


def solved(cell: dict[str, Any], module: str) -> list[str]:
    """The lines of a checkpoint's cell, with a call of its solution after `answer = `."""
    lines, name = source(cell).splitlines(keepends=True), tags(cell)[1]
    code = getattr(importlib.import_module(module), name).__code__
    call = f"{name}({', '.join(code.co_varnames[: code.co_argcount])})"
    at = next(i for i, line in enumerate(lines) if line.startswith("answer = ")) + 1
    return [*lines[:at], f"import {module} as solution; answer = solution.{call}\n", *lines[at:]]


@pytest.mark.nightly  # `make test` executes each notebook once, as it is
@each_notebook
def test_the_solution_passes_the_checkpoint(path: Path, tmp_path: Path) -> None:
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["cells"] = [c for c in whole["cells"] if not {"ranks", "planted"} & set(tags(c))]  # which need real ranks
    for cell in whole["cells"]:
        if tags(cell)[:1] == ["checkpoint"]:
            cell["source"] = solved(cell, f"workbench_lessons.l{path.stem}.solution")
    given, done = tmp_path / path.name, tmp_path / "done.ipynb"
    given.write_text(json.dumps(whole))
    papermill.execute_notebook(str(given), str(done), cwd=str(path.parent), progress_bar=False, kernel_name="python3")
    for name, text in {tags(c)[1]: shown(c) for c in cells(done) if tags(c)[:1] == ["checkpoint"]}.items():
        # the lesson's code may print before it
        assert any(line.startswith(f"{name}: 100%") for line in text.splitlines()), text


@pytest.mark.nightly  # of nbval, and of what our configuration leaves out of it
def test_a_changed_output_fails_the_comparison(tmp_path: Path) -> None:
    right = {"cell_type": "code", "id": "right", "metadata": {}, "execution_count": 1, "source": "print('it is 4')",
             "outputs": [{"output_type": "stream", "name": "stdout", "text": "it is 4\n"}]}
    wrong = right | {"id": "wrong", "execution_count": 2, "source": "print('it is 5')"}
    changed = tmp_path / "changed.ipynb"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    changed.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": [right, wrong]}))
    command = [sys.executable, "-m", "pytest", "--nbval", "--nbval-sanitize-with", ROOT / ".ci" / "nbval_sanitize.cfg",
               "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-v", changed]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    for told in ("mismatch", "it is 5", "1 failed, 1 passed"):
        assert told in done.stdout, done.stdout[-2000:]
