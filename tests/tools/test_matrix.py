"""The matrix: each run by itself, kept, not run again; what cannot run here, what fails, and one table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench.recipe.recipe import RecipeError
from workbench.tools import matrix
from workbench.tools.matrix import Entry, run_matrix, table

pytestmark = pytest.mark.integration

SMALL = {"model.n_layers": "1", "training.steps": "2", "mesh.dp_shard": "2", "mesh.tp": "1"}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """What was started."""
    started = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(matrix.subprocess, "Popen", Noted)
    return started


def made(name: str, step: float, *, ok: bool = True, outcome: str = "PASS", gpus: tuple[str, ...] = ()) -> Entry:
    return Entry(name, {
        "ok": ok, "problems": [] if ok else ["lint: FAIL (node 3)"], "median_step_seconds": step,
        "tokens_per_second": 512 / step, "passes": [{"outcome": outcome}], "profile": None,
        "schedule": {"evidence": {"collectives": 12}}, "training": {"peak_bytes": None, "step_seconds": [1, 2, 3]},
        "machine": {"gpus": list(gpus), "cpu": "A CPU", "cores": 2}, "world": {"size": 2, "kind": "gloo"},
        "versions": {"torch": "2.13.0", "python": "3.11.7"},
    })


@pytest.mark.nightly  # four runs
def test_kept_runs_are_not_run_again_and_changed_ones_are(tmp_path: Path, processes) -> None:
    names = ["llama3_fsdp", "llama3_block_bucketing_cudagraph"]
    first = run_matrix(names, tmp_path, changes=SMALL, world="gloo", repeats=2)
    assert len(processes) == 3  # what was refused once is not tried again
    assert [e.refused for e in first] == [False, True, False, True] and not any(e.failed for e in first)
    assert "needs CUDA (it runs on a GPU only)" in first[1].problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama3_fsdp.1.json", "llama3_fsdp.2.json"]
    assert first[0].report["median_step_seconds"] > 0 and first[0].report["recipe"]["model"]["n_layers"] == 1
    again = run_matrix(names[:1], tmp_path, changes=SMALL, repeats=2)
    assert len(processes) == 3 and [e.report for e in again] == [first[0].report, first[2].report]
    changed = run_matrix(names[:1], tmp_path, changes=SMALL | {"training.steps": "1"})
    assert len(processes) == 4 and changed[0].report["recipe"]["training"]["steps"] == 1


def test_a_run_over_its_limit_is_ended_and_can_be_run_again(tmp_path: Path, processes, monkeypatch) -> None:
    monkeypatch.setattr(matrix, "ENDS", 0.0)
    (entry,) = run_matrix(["llama3_fsdp"], tmp_path, changes=SMALL, timeout=0.5)
    assert entry.problem == "not done after 0.5 s: give it more with --timeout" and entry.failed
    assert processes[0].poll() is not None and not list(tmp_path.iterdir())


def test_what_a_rank_says_is_told(tmp_path: Path) -> None:
    (entry,) = run_matrix(["llama3_fsdp"], tmp_path, changes=SMALL | {"training.lr": "1e300"}, world="gloo",
                          timeout=0.1)
    assert entry.report is None and entry.failed and "Traceback" not in entry.problem and entry.problem


def test_the_table_has_noise_bands_and_says_who_did_not_run() -> None:
    entries = [made("a", 0.1), made("b", 0.2), made("a", 0.12), made("b", 0.2, outcome="NO_EFFECT"),
               Entry("c", None, "pass 'cudagraph' needs CUDA", refused=True)]
    assert table(entries) == (
        "recipe  verdicts       step ms    tokens/s  collectives\n"
        "a       PASS       110.0 ±10.0  4,693 ±427           12\n"
        "b       NO_EFFECT        200.0       2,560           12\n\n"
        "c did not run: pass 'cudagraph' needs CUDA\n\n"
        "2 gloo ranks, torch 2.13.0, Python 3.11.7, A CPU, 2 cores; step: median of 2 after the first")


def test_a_failure_is_told_and_machines_are_not_mixed_in_silence() -> None:
    text = table([made("a", 0.1, ok=False), made("b", 0.1, gpus=("A GPU",))])
    assert "a       FAIL" in text and "a: lint: FAIL (node 3)" in text
    assert "A CPU, 2 cores" in text and "A GPU, 2 cores" in text


def test_bad_input_before_anything_runs(tmp_path: Path, processes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match="no recipe of this name"):
        run_matrix(["llama3", "lama3"], tmp_path)
    with pytest.raises(WorkbenchError, match="two recipes are called 'llama3'"):
        run_matrix(["llama3", "llama3"], tmp_path)
    (tmp_path / "llama3.1.json").write_text("{}")
    with pytest.raises(WorkbenchError, match=r"llama3\.1\.json: not a run's report \(it has no .recipe.\)"):
        run_matrix(["llama3"], tmp_path, changes={"model.flavor": "debug"})
    assert main(["matrix", "llama3", "--out", str(tmp_path / "llama3.1.json")]) == 2
    assert "is a file: give a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["matrix", "--repeats", "0"])
    assert not processes


@pytest.mark.nightly
def test_sigterm_ends_the_run_that_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workbench", "matrix", "llama3_fsdp", "--world", "gloo", "--out", str(tmp_path)]
    whole = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{whole.pid}/task/{whole.pid}/children")
    deadline = time.monotonic() + 60
    while not (run := children.read_text().split()):
        assert whole.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    whole.send_signal(signal.SIGTERM)
    assert whole.wait(40) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(run[0]), 0)
