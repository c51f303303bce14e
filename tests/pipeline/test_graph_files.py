"""Dumped graphs: every stage, readable with source lines, each a program that runs by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.errors import WorkbenchError
from workbench.pipeline.graph_files import module_text, random_input
from workbench.pipeline.run import run
from workbench.recipe.recipe import load_recipe

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    recipe = load_recipe("tour").override({"mesh.tp": 2, "model.n_layers": 1})
    run(recipe, world="fake", progress=False, dump=folder)
    return folder / "rank0"


def played(path: Path) -> str:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_stage_has_its_files(dumped: Path) -> None:
    assert sorted(p.name for p in dumped.iterdir()) == [
        "00_captured_joint.py", "01_inductor_decomposition_joint.py", "02_activation_checkpointing_joint.py",
        "03_reshard_after_forward_joint.py", "04_partitioned_backward.py", "04_partitioned_forward.py",
        "05_transformer_block_bucketing_backward.py", "05_transformer_block_bucketing_forward.py"]


def test_source_lines_are_comments(dumped: Path) -> None:
    text = (dumped / "00_captured_joint.py").read_text()
    assert '"""tour: joint graph, captured, rank 0 of 4 (fake).' in text
    assert "decoder.py:" in text and "code: x = self.tok_embeddings(tokens)" in text
    assert 'GROUPS = {' in text and "('primals_1', 'float32', (64, 128), (128, 1))," in text


@pytest.mark.compat
@pytest.mark.nightly
def test_they_run(dumped: Path) -> None:
    forward = played(dumped / "05_transformer_block_bucketing_forward.py")
    assert "outputs: float32[]" in forward
    assert "outputs: float32[], float32[64, 128]" in played(dumped / "00_captured_joint.py")


@pytest.mark.nightly
def test_a_broken_copy_does_not_run(dumped: Path, tmp_path: Path) -> None:
    text = (dumped / "05_transformer_block_bucketing_forward.py").read_text()
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace("torch.ops.aten.mm.default(", "torch.ops.aten.mm.default(0, ", 1))
    assert subprocess.run([sys.executable, str(broken)], capture_output=True, cwd=ROOT).returncode != 0


def test_a_compiled_callable_says_that_it_is_one() -> None:
    text = module_text(lambda args: args, "tour: forward", 4, 0)
    namespace: dict = {}
    exec(text, namespace)
    assert "a compiled callable" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "uint8"])
def test_random_inputs_have_the_layout(dtype: str) -> None:
    made = random_input(("x", dtype, (3, 4), (1, 3)))
    assert made is not None
    assert (made.dtype, tuple(made.shape), made.stride()) == (getattr(torch, dtype), (3, 4), (1, 3))
    assert random_input(("mesh", "", (), ())) is None
    empty = random_input(("x", dtype, (0, 4), (4, 1)))
    assert empty is not None and empty.numel() == 0


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "rank0").write_text("in the way")
    recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 2, "model.n_layers": 1})
    with pytest.raises(WorkbenchError, match=r"rank0: the graphs cannot be written: File exists"):
        run(recipe, world="fake", progress=False, dump=tmp_path)
