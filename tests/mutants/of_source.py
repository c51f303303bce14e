"""Plant faults in the core's own source, one at a time, and run the unit tests that reach its line.

    python tests/mutants/of_source.py --out source.jsonl    (start it again to go on; by hand: it takes half an hour)
    python tests/mutants/of_source.py --table source.jsonl benchmarks/results/source_mutants.json

At first all unit tests run once, and coverage notes which of them runs which line. Each mutant is then written into a
checkout of HEAD of its own, where these tests run until one fails. A line outside of functions runs with an import: all
tests count that run a line of its file.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("torch_api", "recipe", "world", "authoring", "graph", "passes", "checks", "pipeline", "tools")
SEED, MUTANTS, SECONDS = 46, 40, 600
UNIT = "not integration and not ranks and not nightly and not gpu"
OPPOSITE: dict[type, type] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult}
WHY: dict[str, str] = {}
"""Of the mutants that no test catches: why each does the same."""


@dataclass(frozen=True)
class Fault:
    """The text from `start` to `end` (line from 1, byte) becomes `now`. inside: whether it is in a function."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    was: str
    now: str
    inside: bool

    @property
    def key(self) -> str:
        return f"{self.file}:{self.start[0]}: {self.was} -> {self.now}"

    def planted(self, source: str) -> str:
        """The source with the fault."""
        before, _, after = parts(source.encode().splitlines(keepends=True), self.start, self.end)
        return (before + self.now.encode() + after).decode()


def parts(lines: list[bytes], start: tuple[int, int], end: tuple[int, int]) -> tuple[bytes, bytes, bytes]:
    """The text before two places, between them, and behind them."""
    places = [sum(map(len, lines[: line - 1])) + column for line, column in (start, end)]
    whole = b"".join(lines)
    return whole[: places[0]], whole[places[0] : places[1]], whole[places[1] :]


def changed(node: ast.AST) -> ast.AST | None:
    """The node with one thing about it otherwise; None where nothing is to be changed."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in OPPOSITE:
            return ast.Compare(left, [OPPOSITE[type(operator)]()], [right])
        case ast.BoolOp(operator, values):
            return ast.BoolOp(OPPOSITE[type(operator)](), values)
        case ast.BinOp(left, operator, right) if type(operator) in OPPOSITE:
            return ast.BinOp(left, OPPOSITE[type(operator)](), right)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() as value):
            return ast.Constant(value + 1)
        case ast.Return(ast.expr()):
            return ast.Return(ast.Constant(None))
    return None


def faults(file: str, source: str) -> Iterator[Fault]:
    """All faults of one source."""
    tree, lines = ast.parse(source), source.encode().splitlines(keepends=True)
    inner: set[ast.AST] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inner.update(node for statement in function.body for node in ast.walk(statement))
    types = {node for owner in ast.walk(tree) for field in ("annotation", "returns")
             if getattr(owner, field, None) is not None for node in ast.walk(getattr(owner, field))}
    for node in ast.walk(tree):
        now = None if node in types else changed(node)
        if now is not None:
            assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
            text = ast.unparse(ast.fix_missing_locations(now))
            text = f"({text})" if isinstance(now, ast.BoolOp | ast.BinOp | ast.Compare) else text
            start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
            was = " ".join(parts(lines, start, end)[1].decode().split())
            yield Fault(file, start, end, was, text, node in inner)


def chosen(count: int) -> list[Fault]:
    """Faults of the core, by the seed."""
    every = [fault for room in ROOMS for path in sorted((ROOT / "workbench" / room).rglob("*.py"))
             for fault in faults(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]
    Random(SEED).shuffle(every)
    return every[:count]


def reached(path: Path) -> dict[str, dict[str, list[str]]]:
    """For each file and line the tests that run it; noted in `path` the first time."""
    if not path.exists():
        import coverage
        import pytest

        cover = coverage.Coverage(data_file=None, source=[str(ROOT / "workbench")], config_file=False)

        class Contexts:
            def pytest_runtest_setup(self, item: Any) -> None:
                cover.switch_context(item.nodeid)

        cover.start()
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", UNIT, str(ROOT / "tests")], plugins=[Contexts()])
        cover.stop()
        data = cover.get_data()
        lines = {str(Path(file).relative_to(ROOT)): {
            str(line): [test for test in tests if test] for line, tests in data.contexts_by_lineno(file).items()}
            for file in data.measured_files()}
        path.write_text(json.dumps(lines), encoding="utf-8")
    table: dict[str, dict[str, list[str]]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def tests_of(fault: Fault, table: dict[str, dict[str, list[str]]]) -> list[str]:
    """The tests that reach the fault, those of its own room first."""
    lines = table.get(fault.file, {})
    numbers = map(str, range(fault.start[0], fault.end[0] + 1)) if fault.inside else lines
    tests = dict.fromkeys(test for number in numbers for test in lines.get(number, ()))
    room = f"tests/{fault.file.split('/')[1]}/"
    return sorted(tests, key=lambda test: not test.startswith(room))


@contextmanager
def checkout() -> Iterator[Path]:
    """The files of HEAD in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, "HEAD"], cwd=ROOT, check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def failing(folder: Path, tests: Sequence[str]) -> str:
    """The first of these tests that fails in the folder, or how the run ended; "" where all pass."""
    paths = os.pathsep.join([str(folder), str(folder / "tests"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        run = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, timeout=SECONDS,
                             capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"no end within {SECONDS} s"
    told = [line.split()[1] for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if run.returncode == 0 else (told or [f"exit status {run.returncode}"])[0]


def judged(out: Path) -> Iterator[dict[str, Any]]:
    """The rows of the mutants that the file does not hold yet; each is written as soon as it is judged."""
    known = {row["key"] for row in read(out)}
    table = reached(out.with_suffix(".lines.json"))
    with checkout() as folder, out.open("a", encoding="utf-8") as file:
        for fault in chosen(MUTANTS):
            if fault.key in known:
                continue
            tests, path = tests_of(fault, table), folder / fault.file
            source = path.read_text(encoding="utf-8")
            path.write_text(fault.planted(source), encoding="utf-8")
            by = failing(folder, tests) if tests else ""
            path.write_text(source, encoding="utf-8")
            row = {"key": fault.key, **asdict(fault), "tests": len(tests), "by": by}
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def read(out: Path) -> list[dict[str, Any]]:
    """The rows so far."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def write_table(rows: Path, target: Path) -> None:
    """What benchmarks/results keeps of a run's rows."""
    planted = read(rows)
    met = [row for row in planted if row["tests"]]
    left = [{"fault": row["key"], "tests": row["tests"], "why": WHY.get(row["key"], "")}
            for row in met if not row["by"]]
    table = {"command": "python tests/mutants/of_source.py", "seed": SEED, "planted": len(planted), "reached": len(met),
             "caught": len(met) - len(left), "not caught": left,
             "not reached": [row["key"] for row in planted if not row["tests"]],
             "caught by": {row["key"]: row["by"] for row in met if row["by"]}}
    target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("source.jsonl"))
    parser.add_argument("--table", nargs=2, type=Path, metavar=("ROWS", "JSON"), help="write the table and end")
    options = parser.parse_args()
    if options.table:
        write_table(*options.table)
        return
    for row in judged(options.out):
        print(f"{row['key'][:100]}: {row['by'] or 'not caught'} ({row['tests']} tests)", file=sys.stderr)


if __name__ == "__main__":
    main()
