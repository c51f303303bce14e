"""Each example is short, and ends in status 0 only if what it shows is true."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.torch_api.determinism import deterministic

EXAMPLES = Path(__file__).parents[1] / "examples"


def status_of(source: str) -> int:
    """The exit status of a program, run here as the main module."""
    with pytest.raises(SystemExit) as end:
        exec(compile(source, "example.py", "exec"), {"__name__": "__main__"})
    return int(end.value.code or 0)


def test_each_example_is_under_sixty_lines():
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lines and {name: count for name, count in lines.items() if count >= 60} == {}


@pytest.mark.integration
def test_one_gpu():
    source = (EXAMPLES / "one_gpu.py").read_text()
    assert status_of(source) == 0
    light = source.replace("joint_passes=joint_passes, passes=passes", 'level="light"')
    wrong = light.replace("eager(*batch)", "1.01 * eager(*batch)")
    assert light != source and wrong != light and status_of(wrong) == 1


@pytest.mark.integration
def test_hugging_face():
    pytest.importorskip("transformers")
    source = (EXAMPLES / "hugging_face.py").read_text()
    assert status_of(source) == 0
    light = source.replace('level="full"', 'level="light"')
    wrong = light.replace("theirs(input_ids=tokens, labels=tokens).loss", "1.01 * theirs(tokens, labels=tokens).loss")
    unfused = light.replace("LlamaConfig(", 'LlamaConfig(attn_implementation="eager", ')
    assert light not in (source, wrong, unfused) and status_of(wrong) == status_of(unfused) == 1


@pytest.mark.ranks
@pytest.mark.integration
@pytest.mark.parametrize("blocks", [1, pytest.param(4, marks=pytest.mark.nightly)])  # quick, and as it stands
def test_fsdp2(tmp_path, blocks):
    source = (EXAMPLES / "fsdp2.py").read_text().replace("range(4)", f"range({blocks})")
    ranks = min(2, torch.cuda.device_count() or 2)
    (tmp_path / "example.py").write_text(source)
    end = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "example.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert end.returncode == 0 and f"rank {ranks - 1}: bitwise equal to FSDP2: True" in end.stdout, end


@pytest.mark.integration
def test_fsdp2_that_trains_otherwise(monkeypatch, capsys):
    """On one rank, this process, adopted and not compiled."""
    source = (EXAMPLES / "fsdp2.py").read_text().replace("(5, 4, 65)", "(1, 1, 9)").replace(
        "torch.compile(model, backend=backend, fullgraph=True)", "model")
    wrong = source.replace("train(eager, eager)", "train(eager, lambda tokens: 1.01 * eager(tokens))")
    port = str(torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    for text, status in ((source, 0), (wrong, 1)):
        with deterministic(False):
            assert status_of(text) == status
        assert f"rank 0: bitwise equal to FSDP2: {not status}" in capsys.readouterr().out
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
