"""The doctor: each fact that matters changes a line and says what to do."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.tools.compatibility import Table, load_tables, results_dir
from workbench.tools.doctor import Facts, findings, look, text
from workbench.torch_api.supported import TORCH_RANGE, minor, torch_problem

ROOT = Path(__file__).parents[2]
OUTCOMES = (("capture", "passed"), ("bucketing", "failed"), ("flex", "skipped"))
TABLES = [Table("2.11.0", "Linux x86_64", OUTCOMES), Table("2.13.0", "Linux x86_64", OUTCOMES[:1])]
GOOD = Facts("3.11.7", ("Linux", "x86_64"), "2.13.0+cpu", 2, "g++ 12.2.0",
             packages={"papermill": "2.7.0"}, tables=TABLES)


def test_a_good_machine_is_ready_and_each_test_that_did_not_pass_is_told() -> None:
    assert [f.mark for f in findings(GOOD)].count("bad") == 0
    assert text(findings(GOOD)).endswith("ready: try `workbench tour`")
    states = {f.topic: f.state for f in findings(replace(GOOD, torch="2.11.0"))}
    assert (states["failed"], states["skipped"]) == ("bucketing", "flex")


@pytest.mark.parametrize(("topic", "change", "mark", "state", "do"), [
    ("platform", {"system": ("Darwin", "arm64")}, "note", "Darwin arm64, untested", "it may work"),
    ("python", {"python": "3.13.1"}, "note", "3.13.1, untested", "tested on Python 3.11 and 3.12"),
    ("torch", {"torch": "2.10.0"}, "bad", "2.10.0", "pip install 'torch>=2.11,<2.16'"),
    ("torch", {}, "ok", "2.13.0+cpu: 1 of 1 tests pass on 2.13.0, Linux x86_64", ""),
    ("torch", {"torch": "2.11.0"}, "note", "2.11.0: 1 of 3 tests pass on 2.11.0, Linux x86_64", ""),
    ("torch", {"torch": "2.14.1+cu130"}, "note", "2.14.1+cu130: no table of its tests here",
     "make test-fast TORCH=2.14.1 in a checkout"),
    ("torch", {"tables": "x.json is no table"}, "note", "2.13.0+cpu; x.json is no table", ""),
    ("packages", {"packages": {"papermill": None}}, "bad", "missing: papermill", "pip install papermill"),
    ("gloo ranks", {"gloo": False}, "bad", "this torch has no gloo", "install a torch build with gloo"),
    ("nccl ranks", {}, "note", "not here: no CUDA GPU can be used", "GPUs need a CUDA build"),
    ("nccl ranks", {"gpus": ["H200", "H200"], "nccl": True}, "ok", "up to 2: 2 x H200", ""),
    ("triton", {"gpus": ["H200"], "nccl": True}, "note", "not installed", "pip install triton"),
    ("full Inductor", {"compiler": None}, "note", "no C++ compiler: full_inductor_compilation is refused", "g++"),
])
def test_what_is_missing_is_told_with_what_to_do(topic, change, mark, state, do) -> None:
    (finding,) = [f for f in findings(replace(GOOD, **change)) if f.topic == topic]
    assert finding.mark == mark and finding.state.startswith(state) and do in finding.do


def test_the_tables_are_read_from_their_files(tmp_path: Path) -> None:
    rows = [{"what": "a", "outcome": "passed"}, {"what": "b", "outcome": "failed"}]
    for version in ("2.13.0", "2.9.1+cpu"):
        data = {"torch": version, "system": "Linux", "machine": "x86_64", "rows": rows}
        (tmp_path / f"compat_torch_{version}.json").write_text(json.dumps(data))
    first, second = load_tables(tmp_path)
    assert (first.torch, second.torch, first.passed, first.others) == ("2.9.1", "2.13.0", 1, [("b", "failed")])
    (tmp_path / "compat_torch_2.14.0.json").write_text('{"torch": "2.14.0"}')
    with pytest.raises(WorkbenchError, match=r"compat_torch_2.14.0.json: not a table of results \(it has no .rows."):
        load_tables(tmp_path)


def test_the_declared_range_is_that_of_the_tables_and_all_their_tests_pass() -> None:
    assert TORCH_RANGE in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    tables = load_tables(results_dir())
    low, high = (minor(bound) for bound in TORCH_RANGE.split(","))
    assert [minor(t.torch) for t in tables] == [(2, n) for n in range(low[1], high[1])]
    assert low[0] == high[0] == 2 and all(t.rows and not t.others for t in tables)


def test_a_torch_outside_the_range_must_be_mended() -> None:
    assert text(findings(replace(GOOD, torch="2.9.0"))).endswith("fix first: torch")
    assert all(map(torch_problem, ("2.10.9", "2.16.0", "3.0.0", "2.9.1")))
    assert not any(map(torch_problem, ("2.11.0", "2.15.1+cu130")))


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    bad = any(f.mark == "bad" for f in findings(look()))
    assert main(["doctor"]) == int(bad)
    assert "fake world    any mesh, one process" in capsys.readouterr().out
