from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.export.test_artifacts import tiny
from workbench import compile_recipe


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a small recipe on two ranks of tensor parallelism, which no test changes."""
    out = tmp_path_factory.mktemp("artifacts") / "tp2"
    compile_recipe(tiny("llama3", mesh__dp_shard=1, mesh__tp=2), out)
    return out


@pytest.fixture
def mine(compiled: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(compiled, tmp_path / "copy"))
