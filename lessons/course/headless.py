"""Runs a lesson's notebook without a browser: checks its parameters, and keeps the notebook and a page.

python -m workbench_lessons.course.headless LESSON PARAMETERS FOLDER, with the parameters as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from workbench.errors import WorkbenchError, temporary
from workbench.pipeline.progress import PROGRESS, REPORTS, Progress, Teller, telling
from workbench.recipe.files import course_folder, write_whole
from workbench_lessons.course.lesson import load_lesson, parameters


class NotebookError(WorkbenchError):
    """A cell of the notebook failed; the message names the cell and the kept notebook."""

    failed_run = True


@dataclass(frozen=True)
class Executed:
    """The notebook and the page of a run; `tables` are the verdict tables of its `run` calls, in order."""

    notebook: Path
    page: Path
    tables: list[str]


def notebooks_dir() -> Path:
    """Where notebooks are found: $WORKBENCH_NOTEBOOKS, or those of the package."""
    return Path(os.environ.get("WORKBENCH_NOTEBOOKS") or course_folder("notebooks"))


def from_text(lesson: str, changes: Mapping[str, str]) -> dict[str, Any]:
    """Parameters from the command line: each value is read as TOML where the lesson's parameter is not text."""
    kinds = {name: p.type for name, p in load_lesson(lesson).parameters.items()}
    values: dict[str, Any] = {}
    for name, text in changes.items():
        values[name] = text
        if kinds.get(name) != "str":
            with contextlib.suppress(ValueError):
                values[name] = tomllib.loads(f"value = {text}")["value"]
    return values


def run_lesson(
    name: str,
    values: Mapping[str, Any] | None,
    out: Path,
    *,
    source: Path | None = None,
    progress: Progress = True,
) -> Executed:
    """Execute notebooks/NAME.ipynb, or the copy `source`, with `values` for its parameters, into the folder `out`.

    values: None keeps those in the notebook. progress: as for `run`; a cell is a stage. Raises LessonError for an
    invalid parameter before the first cell, and NotebookError where a cell fails: the notebook is kept, with the
    failing cell marked.
    """
    checked = parameters(load_lesson(name), **values).model_dump() if values is not None else {}
    source = source or notebooks_dir() / f"{name}.ipynb"
    if not source.is_file():
        raise WorkbenchError(
            f"{source}: no such notebook: set WORKBENCH_NOTEBOOKS to their folder"
        )
    try:
        json.loads(source.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError):
        raise WorkbenchError(f"{source}: is not a Jupyter notebook") from None
    out.mkdir(parents=True, exist_ok=True)
    target, page = out / source.name, out / f"{name}.html"
    page.unlink(missing_ok=True)  # of an earlier run
    with telling(progress) as tell, _reports() as folder:
        _execute(source, target, checked, tell)
        tables = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    write_whole(page, page_of(target))
    return Executed(target, page, tables)


@contextlib.contextmanager
def _reports() -> Iterator[Path]:
    """A folder for the reports of `run` calls in kernels that start inside, which draw no progress bars."""
    with (temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-reports-")) as folder,
          mock.patch.dict(os.environ, {REPORTS: folder, PROGRESS: "0"})):
        yield Path(folder)


def _execute(source: Path, target: Path, values: dict[str, Any], tell: Teller) -> None:
    tell(f"start the kernel of {source.stem}")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import papermill
        from papermill.clientwrap import PapermillNotebookClient
        from papermill.exceptions import PapermillExecutionError

        def begins(cell: Any, cell_index: int) -> None:
            if cell.cell_type == "code":
                tell(f"{source.stem}, cell {cell_index}")

        try:
            # nbclient's issue 312: to answer interact's Output widget may hang; its outputs become the cell's
            with mock.patch.object(
                PapermillNotebookClient, "on_comm_open_jupyter_widget", lambda *_: None
            ):
                done = papermill.execute_notebook(
                    str(source), str(target), values, kernel_name="python3", language="python", cwd=str(source.parent),
                    progress_bar=False, on_cell_start=begins,
                    extra_arguments=["--log-level=CRITICAL"])  # no word of an interrupt at its end
            _refuse_exit(done)
        except PapermillExecutionError as error:
            raise NotebookError(_failure(source, target, error)) from None


def _refuse_exit(notebook: Any) -> None:
    """Raise for `sys.exit(0)` in a cell, which ends the notebook and which papermill takes for success."""
    from papermill.exceptions import PapermillExecutionError

    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                raise PapermillExecutionError(cell_index=index, exec_count=cell.execution_count, source=cell.source,
                                              ename=output.ename, evalue=output.evalue, traceback=output.traceback)


def _failure(source: Path, target: Path, error: Any) -> str:
    first, *_ = error.source.strip().splitlines() or [""]
    cell = f"code cell {error.exec_count}" if error.exec_count else f"cell {error.cell_index}"
    problem = f"{error.ename}: {str(error.evalue).strip()}"
    if not error.evalue:  # a magic's UsageError is printed, and not raised
        problem = _printed(target) or error.ename
    return (f"{source.name}: {cell} failed, which starts `{first}`\n"
            f"{problem}\nthe notebook up to there is kept: {target}")


def _printed(target: Path) -> str:
    """What the cell that failed wrote to stderr."""
    cells = json.loads(target.read_text(encoding="utf-8"))["cells"]
    failed = [
        cell for cell in cells if cell["metadata"].get("papermill", {}).get("status") == "failed"
    ]
    return "".join("".join(output["text"]) for cell in failed for output in cell["outputs"]
                   if output.get("name") == "stderr").strip()


def page_of(notebook: Path) -> str:
    """A notebook as nbconvert's HTML page."""
    return exported(notebook.read_text(encoding="utf-8"), notebook.stem)


def exported(notebook: str, title: str, **options: Any) -> str:
    """The text of a notebook as nbconvert's HTML page. options: of its HTMLExporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbconvert import HTMLExporter

        page: str = HTMLExporter(**options).from_file(io.StringIO(notebook), {"metadata": {"name": title}})[0]
    return page.replace("word-break: break-all", "word-break: normal")  # its lines break within words


if __name__ == "__main__":  # one lesson of a course; this process imports no torch
    lesson_name, values, folder_name = sys.argv[1:]
    try:
        run_lesson(lesson_name, json.loads(values), Path(folder_name), progress=False)
    except WorkbenchError as error:
        sys.exit(str(error))
