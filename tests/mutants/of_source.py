"""Plant faults in the core's own source, one at a time, and run the unit tests that reach its line.

    python tests/mutants/of_source.py    (by hand: half an hour; it writes benchmarks/results/source_mutants.json)

At first all unit tests run once, and coverage notes which of them runs which line. Each mutant is then written into a
clone of HEAD, where these tests run until one fails. A line outside of functions runs with an import: all tests count
that run a line of its file.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
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


@dataclass(frozen=True)
class Fault:
    """In `lines` of a file, the bytes from `begin` to `end` become `now`. inside: whether it is in a function."""

    file: str
    lines: range
    begin: int
    end: int
    was: str
    now: str
    inside: bool

    @property
    def key(self) -> str:
        return f"{self.file}:{self.lines[0]}: {self.was} -> {self.now}"

    def planted(self, source: bytes) -> bytes:
        return source[:self.begin] + self.now.encode() + source[self.end:]


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


def faults(file: str, source: bytes) -> Iterator[Fault]:
    """All faults of one source."""
    tree = ast.parse(source)
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    inner: set[ast.AST] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inner.update(node for statement in function.body for node in ast.walk(statement))
    types = {node for owner in ast.walk(tree) for field in ("annotation", "returns")
             if getattr(owner, field, None) is not None for node in ast.walk(getattr(owner, field))}
    for node in ast.walk(tree):
        now = None if node in types else changed(node)
        if now is not None:
            text = ast.unparse(ast.fix_missing_locations(now))
            text = f"({text})" if isinstance(now, ast.BoolOp | ast.BinOp | ast.Compare) else text
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            was = " ".join(source[begin:end].decode().split())
            yield Fault(file, range(node.lineno, node.end_lineno + 1), begin, end, was, text, node in inner)


def chosen(count: int) -> list[Fault]:
    """Faults of the core, by the seed."""
    every = [fault for room in ROOMS for path in sorted((ROOT / "workbench" / room).rglob("*.py"))
             for fault in faults(str(path.relative_to(ROOT)), path.read_bytes())]
    Random(SEED).shuffle(every)
    return every[:count]


def reached() -> dict[str, dict[int, list[str]]]:
    """For each file and line the unit tests that run it; "" stands for the imports."""
    import coverage
    import pytest

    cover = coverage.Coverage(data_file=None, source=[str(ROOT / "workbench")], config_file=False)

    class Contexts:
        def pytest_runtest_setup(self, item: Any) -> None:
            cover.switch_context(item.nodeid)

    with cover.collect():
        pytest.main(["-q", "-p", "no:cacheprovider", "-m", UNIT, str(ROOT / "tests")], plugins=[Contexts()])
    data = cover.get_data()
    return {str(Path(file).relative_to(ROOT)): data.contexts_by_lineno(file) for file in data.measured_files()}


def tests_of(fault: Fault, lines: dict[int, list[str]]) -> list[str]:
    """The tests that reach the fault, those of its own room first."""
    numbers = fault.lines if fault.inside else lines
    tests = dict.fromkeys(test for number in numbers for test in lines.get(number, ()) if test)
    room = f"tests/{fault.file.split('/')[1]}/"
    return sorted(tests, key=lambda test: not test.startswith(room))


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


def judged() -> Iterator[dict[str, Any]]:
    """Of each mutant: how many tests reach it, and which one catches it, or ""."""
    table = reached()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(ROOT), folder], check=True)
        for fault in chosen(MUTANTS):
            tests, path = tests_of(fault, table.get(fault.file, {})), Path(folder, fault.file)
            source = path.read_bytes()
            path.write_bytes(fault.planted(source))
            by = failing(Path(folder), tests) if tests else ""
            path.write_bytes(source)
            print(f"{fault.key[:100]}: {by or 'not caught'} ({len(tests)} tests)", file=sys.stderr)
            yield {"fault": fault.key, "tests": len(tests), "by": by}


def main() -> None:
    planted = list(judged())
    caught = {row["fault"]: row["by"] for row in planted if row["by"]}
    left = [{"fault": row["fault"], "tests": row["tests"]} for row in planted if row["tests"] and not row["by"]]
    table = {"command": "python tests/mutants/of_source.py", "seed": SEED, "planted": len(planted),
             "reached": len(caught) + len(left), "caught": len(caught), "not caught": left,
             "not reached": [row["fault"] for row in planted if not row["tests"]], "caught by": caught}
    target = ROOT / "benchmarks" / "results" / "source_mutants.json"
    target.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
