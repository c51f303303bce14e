"""The committed tables of `make test-fast`: which tests passed on which torch. No torch here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import WorkbenchError


@dataclass(frozen=True)
class Table:
    """One torch, by its release such as "2.13.0". rows: (test, outcome), outcomes as pytest has them."""

    torch: str
    platform: str
    rows: tuple[tuple[str, str], ...]

    @property
    def passed(self) -> int:
        return sum(outcome == "passed" for _, outcome in self.rows)

    @property
    def others(self) -> list[tuple[str, str]]:
        """The rows that did not pass."""
        return [row for row in self.rows if row[1] != "passed"]


def results_dir() -> Path:
    """Where the tables are: benchmarks/results of the checkout."""
    return Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def load_tables(folder: Path) -> list[Table]:
    """All tables of a folder, oldest torch first; none where it does not exist. WorkbenchError names a bad file."""
    found = []
    for path in folder.glob("compat_torch_*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple((row["what"], row["outcome"]) for row in data["rows"])
            found.append(Table(data["torch"].split("+")[0], f"{data['system']} {data['machine']}", rows))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkbenchError(f"{path.name} is no table of results ({type(error).__name__}: {error}): write it "
                                 "again with make test-fast") from None
    return sorted(found, key=lambda table: _numbers(table.torch))


def nearest(tables: list[Table], version: str) -> Table:
    """The table of this torch, else of the nearest minor version; of two as near, the older."""
    here = _numbers(version)
    return min(tables, key=lambda t: (abs(_numbers(t.torch)[0] - here[0]), abs(_numbers(t.torch)[1] - here[1]),
                                      abs(_numbers(t.torch)[2] - here[2])))


def same_release(a: str, b: str) -> bool:
    """Whether two versions differ in their build alone: 2.13.0+cpu is 2.13.0."""
    return a.split("+")[0] == b.split("+")[0]


def _numbers(version: str) -> tuple[int, int, int]:
    numbers = [int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3]]
    major, minor, patch = [*numbers, 0, 0, 0][:3]
    return major, minor, patch
