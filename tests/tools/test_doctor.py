"""The doctor: each fact that matters changes a line and says what to do."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.tools.compatibility import Table, load_tables, results_dir
from workbench.tools.doctor import Facts, Finding, findings, look, text
from workbench.torch_api.supported import TESTED_TORCH, TORCH_RANGE, torch_problem

ROOT = Path(__file__).parents[2]
GOOD = Facts("3.11.7", ("Linux", "x86_64"), "2.13.0+cpu", 2, "g++ 12.2.0", packages={"papermill": "2.7.0"})


def about(what: str, facts: Facts) -> Finding:
    return next(f for f in findings(facts) if f.what == what)


def test_a_good_machine_is_ready() -> None:
    assert [f.mark for f in findings(GOOD)].count("bad") == 0
    assert text(findings(GOOD)).splitlines()[-1] == "ready: try `workbench tour`"
    assert about("platform", GOOD) == Finding("ok", "platform", "Linux x86_64")


@pytest.mark.parametrize(("what", "change", "mark", "found", "do"), [
    ("platform", {"system": ("Darwin", "arm64")}, "note", "Darwin arm64, untested", "it may work"),
    ("python", {"python": "3.13.1"}, "note", "3.13.1, untested", "tested on Python 3.11 and 3.12"),
    ("torch", {"torch": "2.10.0"}, "bad", "2.10.0", "pip install 'torch>=2.11,<2.16'"),
    ("torch", {"torch": None}, "bad", "not installed", "pip install 'torch>=2.11,<2.16'"),
    ("torch", {"torch": "2.15.0"}, "ok", "2.15.0, supported; most tests run on 2.13.0", ""),
    ("packages", {"packages": {"papermill": None}}, "bad", "missing: papermill", "pip install papermill"),
    ("gloo ranks", {"gloo": False}, "bad", "this torch has no gloo", "install a torch build with gloo"),
    ("nccl ranks", {}, "note", "not here: torch is built for the CPU", "install a CUDA build"),
    ("nccl ranks", {"cuda_build": "13.0"}, "note", "not here: no CUDA GPU can be used", "gloo, or a fake world"),
    ("nccl ranks", {"gpus": ["H200", "H200"], "nccl": True}, "ok", "up to 2: 2 x H200", ""),
    ("triton", {"gpus": ["H200"], "nccl": True}, "note", "not installed", "pip install triton"),
    ("full Inductor", {"compiler": None}, "note", "no C++ compiler: full_inductor_compilation is refused", "g++"),
])
def test_what_is_missing_is_told_with_what_to_do(what: str, change: dict, mark: str, found: str, do: str) -> None:
    told = about(what, replace(GOOD, **change))
    assert told.mark == mark and told.found.startswith(found) and do in told.do


def table(torch: str, **outcomes: str) -> Table:
    return Table(torch, "Linux x86_64", tuple(outcomes.items()))


FAILING = table("2.11.0", capture="passed", bucketing="failed", flex="skipped")
WHOLE = table("2.13.0", capture="passed", bucketing="passed")


def told(torch: str | None, tables: list[Table] | str) -> list[tuple[str, str, str]]:
    """(mark, what, what was found) of the lines about tested versions."""
    found = findings(replace(GOOD, torch=torch, tables=tables))
    names = ("tested torch", "failed", "skipped")
    return [(f.mark, f.what, f.found) for f in found if f.what in names]


def test_the_table_of_this_torch_is_told_with_each_test_that_did_not_pass() -> None:
    assert told("2.13.0+cpu", [FAILING, WHOLE]) == [
        ("ok", "tested torch", "2 of 2 tests pass on 2.13.0, Linux x86_64 (tables of 2.11.0 too)")]
    assert told("2.11.0", [FAILING, WHOLE]) == [
        ("note", "tested torch", "1 of 3 tests pass on 2.11.0, Linux x86_64 (tables of 2.13.0 too)"),
        ("note", "failed", "bucketing"), ("note", "skipped", "flex")]


def test_a_torch_without_a_table_is_not_called_tested() -> None:
    (first,) = told("2.14.1+cu130", [FAILING, WHOLE])
    assert first == ("note", "tested torch", "2.14.1+cu130 was not tested; the nearest that was: 2 of 2 tests pass on "
                     "2.13.0, Linux x86_64 (tables of 2.11.0 too)")
    assert about("tested torch", replace(GOOD, torch="2.14.1", tables=[WHOLE])).do == (
        "make test-fast TORCH=2.14.1 in a checkout tests yours")
    assert told("2.12.0", [FAILING, WHOLE])[1:] == [("note", "failed", "bucketing"), ("note", "skipped", "flex")]
    assert told("2.9.0", [WHOLE]) == [("note", "tested torch", "there are tables of 2.13.0")]
    assert told("2.13.0", [])[0][2].startswith("no tables of results here")


def test_the_tables_are_read_from_their_files(tmp_path: Path) -> None:
    assert load_tables(tmp_path / "none") == []
    rows = [{"what": "a", "outcome": "passed"}, {"what": "b", "outcome": "failed"}]
    for version in ("2.13.0", "2.9.1+cpu"):
        data = {"torch": version, "system": "Linux", "machine": "x86_64", "rows": rows}
        (tmp_path / f"compat_torch_{version}.json").write_text(json.dumps(data))
    first, second = load_tables(tmp_path)
    assert (first.torch, second.torch, first.passed, first.others) == ("2.9.1", "2.13.0", 1, [("b", "failed")])
    (tmp_path / "compat_torch_2.14.0.json").write_text('{"torch": "2.14.0"}')
    with pytest.raises(WorkbenchError, match=r"compat_torch_2.14.0.json: not a table of results \(it has no .rows."):
        load_tables(tmp_path)
    assert told("2.13.0", "x.json is no table") == [("note", "tested torch", "x.json is no table")]


def test_the_committed_tables_are_found() -> None:
    tables = load_tables(results_dir())
    assert {"2.11.0", TESTED_TORCH} <= {t.torch for t in tables} and all(t.rows for t in tables)


def test_what_must_be_mended_comes_last() -> None:
    shown = text(findings(replace(GOOD, torch="2.9.0")))
    assert shown.splitlines()[-1] == "fix first: torch"
    assert "fake world" not in shown
    assert "\033" not in shown and "\033[1;31mbad" in text(findings(replace(GOOD, torch="2.9.0")), color=True)


def test_the_range_is_pyprojects() -> None:
    assert TORCH_RANGE in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch=={TESTED_TORCH}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert [bool(torch_problem(v)) for v in ("2.10.9", "2.11.0", "2.15.1+cu130", "2.16.0", "3.0.0", "2.9.1")] == [
        True, False, False, True, True, True]


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    bad = any(f.mark == "bad" for f in findings(look()))
    assert main(["doctor"]) == int(bad)
    assert "fake world    any mesh, one process" in capsys.readouterr().out
