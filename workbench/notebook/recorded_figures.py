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
from workbench.notebook.lessons.lesson import Lesson
from workbench.pipeline.machine import gpus as gpus_here
from workbench.pipeline.machine import machine, versions
from workbench.recipe.files import json_of, reading, write_whole
from workbench.tools.compatibility import results_dir

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
        return table(
            self.name, columns, [[row.get(c, "") for c in columns] for row in self.rows], self.note
        )

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
        entry = {
            "machine": machine(),
            "versions": versions(),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        if folder := os.environ.get(RECORD):
            _write(Path(folder) / f"{lesson.name}.json", name, entry)
        return Figures(name, rows, f"measured here, on {_where(entry)}")
    path = results_dir() / "course" / f"{lesson.name}.json"
    recorded = _read(path).get(name)
    if recorded is None:
        return Figures(
            name,
            (),
            f"not recorded yet, and {gpus} GPU{'s are' if gpus > 1 else ' is'} needed to measure "
            f"it: workbench course --profile gpu --record DIR {lesson.name}",
        )
    return Figures(
        name, tuple(recorded["rows"]), f"recorded on {_where(recorded)}, {recorded['date']}"
    )


def _where(entry: Mapping[str, Any]) -> str:
    names = entry["machine"]["gpus"]
    return f"{len(names)} {names[0]}, torch {entry['versions']['torch']}"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(FileNotFoundError), reading(path, "recorded figures", "record them again"):
        found = json_of(path.read_bytes())
        for entry in found.values():
            rows = entry["rows"]
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError("rows must be a list of tables")
            if not entry["machine"]["gpus"]:
                raise ValueError("the machine must have GPUs")
            _where(entry), entry["date"]
    return found


def _write(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {**_read(path), name: entry}
    write_whole(path, json.dumps(whole, indent=2) + "\n")
