"""The doctor: each fact that matters changes a line and says what to do."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.doctor import Facts, Finding, findings, look, text
from workbench.supported import TESTED_TORCH, TORCH_RANGE, torch_problem

ROOT = Path(__file__).parent.parent
GOOD = Facts("3.11.7", ("Linux", "x86_64"), "2.13.0+cpu", 2, "g++ 12.2.0", packages={"papermill": "2.7.0"})


def about(what: str, facts: Facts) -> Finding:
    return next(f for f in findings(facts) if f.what == what)


def test_a_good_machine_is_ready() -> None:
    assert [f.mark for f in findings(GOOD)].count("bad") == 0
    assert text(findings(GOOD)).splitlines()[-1] == "ready: try `workbench tour`"
    assert about("platform", GOOD) == Finding("ok", "platform", "Linux x86_64")


@pytest.mark.parametrize(("what", "change", "mark", "found", "do"), [
    ("platform", {"system": ("Darwin", "arm64")}, "note", "Darwin arm64, untested", "it may work"),
    ("python", {"python": "3.13.1"}, "note", "3.13.1, untested", "use Python 3.11 or 3.12"),
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


def test_what_must_be_mended_comes_last() -> None:
    shown = text(findings(replace(GOOD, torch="2.9.0")))
    assert shown.splitlines()[-1] == "mend first: torch"
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
