"""Odd surroundings: a temporary folder that vanishes, a clock that jumps, two users at once, a read-only home."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from workbench import ranks
from workbench.errors import WorkbenchError
from workbench.world.ranks import RankError

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


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
