"""A lesson's GPU measurements: measured here where there are GPUs, else the committed figures of such a machine."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.machine import gpus as gpus_here
from workbench.pipeline.machine import machine, versions
from workbench.recipe.files import json_of, reading, write_whole
from workbench.recipe.wording import counted
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.lesson import Lesson

RECORD = "WORKBENCH_RECORD"


@dataclass(frozen=True)
class Figures:
    """Rows of one measurement, with the machine and the day; no rows where nothing was recorded yet."""

    name: str
    rows: tuple[Mapping[str, Any], ...]
    note: str

    def table(self) -> Table:
        """A column for each key of the first row, and a note with the origin of the figures."""
        columns = list(self.rows[0]) if self.rows else []
        cells = [[row.get(column, "") for column in columns] for row in self.rows]
        return table(self.name, columns, cells, self.note)

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def on_gpus(
    lesson: Lesson, name: str, measure: Callable[[], Sequence[Mapping[str, Any]]], *, gpus: int = 1
) -> Figures:
    """The rows of `measure()` where there are `gpus` GPUs; elsewhere the recorded rows.

    Recorded figures are in benchmarks/results/course, one file for each lesson; if $WORKBENCH_RECORD names a folder,
    new measurements are written there in the same form. Raises WorkbenchError for a file with other contents.
    """
    if gpus_here() >= gpus:
        rows = tuple(dict(row) for row in measure())
        date = datetime.date.today().isoformat()
        entry = {"machine": machine(), "versions": versions(), "date": date, "rows": rows}
        if folder := os.environ.get(RECORD):
            _write(Path(folder) / f"{lesson.name}.json", name, entry)
        return Figures(name, rows, f"measured here, on {_where(entry)}")
    path = results_dir() / "course" / f"{lesson.name}.json"
    recorded = _read(path).get(name)
    if recorded is None:
        command = f"workbench course --profile gpu --record DIR {lesson.name}"
        needs = f"measuring it needs {counted(gpus, 'GPU')}"
        return Figures(name, (), f"not recorded yet, and {needs}: {command}")
    origin = f"recorded on {_where(recorded)}, {recorded['date']}"
    return Figures(name, tuple(recorded["rows"]), origin)


def _where(entry: Mapping[str, Any]) -> str:
    names = entry["machine"]["gpus"]
    return f"{len(names)} {names[0]}, torch {entry['versions']['torch']}"


def _read(path: Path) -> dict[str, Any]:
    """The measurements of a file by name; none without the file."""
    with suppress(FileNotFoundError), reading(path, "recorded figures", "record them again"):
        return dict(json_of(path.read_bytes()))
    return {}


def _write(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**_read(path), name: entry}, indent=2) + "\n")


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON object of each line of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
