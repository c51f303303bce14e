"""Odd surroundings: a temporary folder that vanishes, a clock that jumps, two users at once, a read-only home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from workbench import ranks
from workbench.errors import WorkbenchError
from workbench.world.ranks import RankError

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

RUN = ["-m", "workbench", "run", "tour", "--set", "model.n_layers=1", "--set", "training.steps=3", "--json"]
CLOCK = """
import random, time
real = time.time
time.time = lambda: real() + random.choice([-1, 0, 1]) * 86400.0
"""
OTHER = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
         "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # reads all, and writes as nobody
needs_root = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None,
                                reason="only root, with setpriv, can become another user")


def summed(own_group: bool) -> float:
    group = dist.new_group([0, 1]) if own_group else None
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    return value.sum().item()


def test_no_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    with pytest.raises(WorkbenchError) as caught:
        ranks(2)
    assert str(caught.value) == (f"no temporary file can be made in {gone}: No such file or directory: make that "
                                 "folder, free space in it, or set TMPDIR to another")
    gone.mkdir()
    with ranks(2, echo="none") as pool:
        assert pool.run(summed, False) == [6.0, 6.0]
    assert not list(gone.glob("workbench-ranks-*"))


def test_a_temporary_folder_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks hold goes on; a new group needs the folder, and the error names it; then there are new ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ranks(2, echo="none", timeout=30) as pool:
        assert pool.run(summed, True) == [6.0, 6.0]
        (folder,) = tmp_path.glob("workbench-ranks-*")
        shutil.rmtree(folder)
        assert pool.run(summed, False) == [6.0, 6.0]
        pool.timeout = 3
        with pytest.raises(RankError, match=f"{folder}, through which new process groups find each other, was removed"):
            pool.run(summed, True)
        pool.timeout = 30
        assert pool.run(summed, True) == [6.0, 6.0]


def started(before: list[str], report: Path, **env: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen([*before, sys.executable, *RUN, str(report)], cwd=report.parent, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", **env})


def losses(process: subprocess.Popen[str], report: Path) -> list[float]:
    """What a run that is PASS reports."""
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    found: dict[str, Any] = json.loads(report.read_text())
    assert min(found["training"]["step_seconds"]) > 0
    return found["training"]["losses"]


def test_a_clock_that_jumps_by_days(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(tmp_path), str(root)])
    days = "import time; print(len({round(time.time(), -4) for _ in range(99)}))"
    seen = subprocess.run([sys.executable, "-c", days],
                          env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, check=True)
    assert int(seen.stdout) >= 3
    jumping, plain = tmp_path / "jumping.json", tmp_path / "plain.json"
    assert losses(started([], jumping, PYTHONPATH=path), jumping) == losses(started([], plain), plain)


@needs_root
def test_two_users_at_once_and_one_with_a_read_only_home(tmp_path: Path) -> None:
    """They share the machine's temporary folder, and neither finds the other's files."""
    shared, home, own = tmp_path / "shared", tmp_path / "home", tmp_path / "own"
    for folder, mode in ((tmp_path, 0o755), (shared, 0o1777), (home, 0o555), (own, 0o777)):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    tmpdir = {"TMPDIR": str(shared)}
    first = started([], tmp_path / "root.json", **tmpdir)
    second = started(OTHER, own / "nobody.json", HOME=str(home), USER="nobody", LOGNAME="nobody", **tmpdir)
    assert losses(first, tmp_path / "root.json") == losses(second, own / "nobody.json")
    assert not list(home.iterdir()) and not list(shared.glob("workbench-*"))
