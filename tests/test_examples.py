"""Each example is short, and ends in status 0 only if what it shows is true."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from workbench.torch_api.determinism import deterministic

EXAMPLES = Path(__file__).parents[1] / "examples"
FSDP2 = (EXAMPLES / "fsdp2.py").read_text()


def status_of(source: str) -> int:
    """The exit status of a program, run here as the main module; ranks keep their group."""
    with (deterministic(False), mock.patch.object(dist, "init_process_group"),
          mock.patch.object(dist, "destroy_process_group", return_value=0),
          pytest.raises(SystemExit) as end):
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
    light = source.replace('level="full"', 'level="light"').replace("_layers=2", "_layers=1")
    wrong = light.replace("expected = theirs", "expected = 1.01 * theirs")
    assert light not in (source, wrong) and status_of(wrong) == 1


@pytest.mark.integration
def test_fsdp2_on_the_session_s_ranks(pool2):
    """With one block and short texts; what trains otherwise is not compiled."""
    source = FSDP2.replace("range(4)", "range(1)").replace("(5, 4, 65)", "(2, 2, 9)")
    compiled = "torch.compile(model, backend=backend, fullgraph=True)"
    wrong = source.replace(compiled, "lambda tokens: 1.01 * model(tokens)")
    assert wrong != source != FSDP2
    assert pool2.run(status_of, source) == [0, 0] and pool2.run(status_of, wrong) == [1, 1]


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.integration
def test_fsdp2_as_it_stands(tmp_path):
    (tmp_path / "example.py").write_text(FSDP2)
    end = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "example.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert end.returncode == 0 and "rank 1: bitwise equal to FSDP2: True" in end.stdout, end
