"""The committed tables of `make test-fast`: the tests that passed, by version of torch. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workbench.recipe.files import course_folder, json_of, reading
from workbench.torch_api.supported import minor


@dataclass(frozen=True)
class Table:
    """The results with one release of torch, such as "2.13.0". rows: (test, outcome), with pytest's outcomes."""

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
    """The folder of recorded results: an installed package has those that the course reads."""
    return course_folder("benchmarks/results")


def load_tables(folder: Path) -> list[Table]:
    """All tables of a folder, oldest torch first; none if it does not exist. WorkbenchError names a bad file."""
    tables = []
    for path in folder.glob("compat_torch_*.json"):
        with reading(path, "a table of results", "write it again with make test-fast"):
            data = json_of(path.read_bytes())
            rows = tuple((row["what"], row["outcome"]) for row in data["rows"])
            tables.append(
                Table(data["torch"].split("+")[0], f"{data['system']} {data['machine']}", rows)
            )
    return sorted(tables, key=lambda table: minor(table.torch))
