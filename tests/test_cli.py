"""The command line: listings without torch, one run on real ranks, and bad input told in one line each."""

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from workbench.cli import main
from workbench.pipeline import run as run_recipe
from workbench.recipe.contracts import package_contracts
from workbench.recipe.recipe import load_recipe
from workbench.world.diagnosis import Failure, RankError

ROOT = Path(__file__).parent.parent
SMALL = ["--set", "mesh.dp_shard=2", "model.n_layers=1", "training.steps=2"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs on this machine leave and remove folders too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))


def refused(capsys: pytest.CaptureFixture[str], *args: str, status: int = 2) -> str:
    """The one message of a command that must not run."""
    before = os.listdir(tempfile.gettempdir())
    assert main(list(args)) == status
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert os.listdir(tempfile.gettempdir()) == before
    lines = err.splitlines()
    assert all(line.startswith("workbench: error: ") for line in lines), err
    return "\n".join(line.removeprefix("workbench: error: ") for line in lines)


HELP = """
import sys
from workbench.cli import main
for command in ["--help"], ["run", "--help"], ["explain", "--help"], ["bisect", "--help"], ["lessons"]:
    try:
        assert main(command) == 0, command
    except SystemExit as end:
        assert not end.code, command
    assert "torch" not in sys.modules, command
"""


def test_help_and_the_list_of_lessons_import_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.partition("00_tour: ")[0].splitlines())) <= 100


def test_recipes_and_passes_are_told_with_what_they_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0 and capsys.readouterr().out.startswith("Where to start:\n\n  workbench tour ")
    assert main(["recipes"]) == 0
    assert ("llama3_hsdp\n  Hybrid sharding: replicas of a sharded group, with TP inside\n"
            "  model   llama3 debug on dp_replicate 2 x dp_shard 2 x tp 2\n  passes  none\n") in capsys.readouterr().out
    assert main(["passes"]) == 0
    shown = capsys.readouterr().out
    assert ("full_inductor_compilation\n  stage      lowering\n"
            "  numerics   lossy, norm-relative tolerance 1e-05") in shown
    assert "  options    buckets=[], separate_gather_group=true" in shown


def test_one_recipe_pass_or_lesson_is_told_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["recipes", "tour"]) == 0
    (tmp_path / "again.toml").write_text(capsys.readouterr().out)
    assert load_recipe(tmp_path / "again.toml") == load_recipe("tour")
    assert main(["passes", "graph_cleanup"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("graph_cleanup\n  stage ") and "before:\n" in shown and "= aten.t(t)" in shown
    assert main(["lessons", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("03_split_forward_and_backward: ") and "\n  - " in shown and "04_decompose" not in shown
    assert refused(capsys, "passes", "graph_clean") == "unknown pass 'graph_clean': did you mean 'graph_cleanup'?"


@pytest.mark.integration
def test_json_to_standard_output_stands_alone_and_a_page_needs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["run", "llama3_fsdp", *SMALL, "--world", "fake", "--json", "-", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert not Path("-").exists()
    shown = page.read_text()
    assert shown.startswith("<!DOCTYPE html>") and "<title>llama3_fsdp on 2 fake ranks" in shown
    assert "saved for the backward: " in shown and "n_layers = 1" in shown and "workbench run llama3_fsdp" in shown
    assert "<script" not in shown and "://" not in shown


@pytest.mark.integration
def test_a_change_is_answered_also_where_it_needs_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    small = [part for part in SMALL if not part.startswith("mesh")]
    assert main(["what-if", "llama3_fsdp", *small, "mesh.dp_shard=2"]) == 0
    shown = capsys.readouterr().out
    assert "mesh.dp_shard: 8 -> 2" in shown and "estimated saved, bytes" in shown


BAD = [
    (["llama3", "--set", 'passes=["mine"]'], "unknown pass 'mine': register it with @register_pass (--import FILE), "
     f"or use one of {', '.join(sorted(package_contracts()))}"),
    (["tour", "--json", "/no/r.json"], "--json /no/r.json: the folder /no does not exist: make it first"),
    (["tour", "--html", "tests"], "--html tests: is a folder: give a file"),
    (["tour", "--html", "/proc/r.html"], "--html /proc/r.html: cannot be written: No such file or directory"),
    (["llama3_fsdp", "--save-every", "2"], "--save-every 2: give --checkpoints DIR too"),
    (["llama3_fsdp", "--world", "fake", "--checkpoints", "x"], "checkpoints x: a fake world trains nothing: take world "
     "gloo or nccl"),
]


def test_no_folder_of_recipes_or_lessons_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable, *command in (("WORKBENCH_RECIPES", "recipes"), ("WORKBENCH_LESSONS", "lessons"),
                               ("WORKBENCH_LESSONS", "course"), ("WORKBENCH_LESSONS", "check", "2")):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
        told = refused(capsys, *command)
        assert told.startswith(f"{tmp_path / 'none'}: no such folder of ") and variable in told, command


ARGUMENTS = [
    (["run", "llama3", "--timeout", "abc"], "argument --timeout: must be a number of seconds above 0, not 'abc'"),
    (["run", "llama3", "--save-every", "0"], "argument --save-every: must be a whole number, 1 or more, not '0'"),
    (["run", "tour", "--set", "mesh.tp"], "argument --set: mesh.tp: write KEY=VALUE, such as mesh.tp=2; "),
    (["run", "--set", "mesh.tp=2", "tour"], "tour: write KEY=VALUE, such as mesh.tp=2; put an argument without ="),
    (["run", "tour", "--set", "mesh.tp=2", "--set", "mesh.tp=4"],
     "argument --set: mesh.tp is given twice, as '2' and '4': keep one"),
    (["course", "00", "--set", "steps"], "argument --set: steps: write LESSON.PARAMETER=VALUE, such as 00_tour."),
]


def test_an_argument_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    for command, says in ARGUMENTS:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 2 and says in capsys.readouterr().err, command


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for command, says in BAD:
        assert refused(capsys, "run", *command) == says
    for command, says in (
            (["schedule", "llama3_tp", "--ranks", "²"], "'²'"),
            (["run", "llama3", "--import", "README.md"], "README.md: is no .py file"),
            (["what-if", "tour"], "what-if: give a change, such as --set mesh.tp=2"),
            (["check", "02_captur"], "did you mean '02_capture_a_joint_graph'?"),
            (["course", "1", "--record", "README.md"], "--record README.md: is a file: give a folder")):
        assert says in refused(capsys, *command)


def test_a_world_that_is_not_there_or_that_the_mesh_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not torch.cuda.is_available():
        assert refused(capsys, "run", "llama3_fsdp", *SMALL, "--world", "nccl") == (
            "ranks(backend='nccl'): no CUDA GPU can be used here. Use backend='gloo' or 'auto'.")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert refused(capsys, "run", "llama3_fsdp") == (
        "recipe 'llama3_fsdp' needs 8 ranks, and torchrun started 2: change the mesh, or start 8 ranks")


def test_an_unsupported_torch_and_a_command_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "worker", "--connect", "10.0.0.1:29600") == (
        "worker: this command is gone: use torchrun ... -m workbench run RECIPE")
    needs = "this package needs torch>=2.11,<2.16: pip install 'torch>=2.11,<2.16'"
    installed = "workbench.torch_api.supported.installed_torch"
    for version, why in ("2.10.1", "2.10.1 is not supported,"), (None, "is not installed, and"):
        monkeypatch.setattr(installed, Mock(return_value=version))
        assert refused(capsys, "run", "tour") == f"torch {why} {needs}"


@pytest.mark.ranks
@pytest.mark.compat
def test_a_run_under_two_agents_of_torchrun_as_on_two_machines(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    line = ["run", "llama3_fsdp", *SMALL, "data.seq_len=16", "--json", str(tmp_path / "r.json")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "-m", "workbench", *line]
    no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # each agent would give its rank the first one
    agents = [subprocess.Popen(command, cwd=ROOT, env=no_gpu, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
              for _ in range(2)]
    try:
        said = [agent.communicate(timeout=240) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # of an agent that has not ended: it ends its rank
    assert [agent.returncode for agent in agents] == [0, 0], said
    (report,) = [out for out, _ in said if out]  # rank 0 alone tells it, of whichever agent
    assert report.splitlines()[-1] == "PASS"
    assert "llama3_fsdp on 2 gloo ranks (dp_shard 2)" in report
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["command"] == shlex.join(["workbench", *line])
    assert data["ok"] and data["schedule"]["outcome"] == "PASS"
    assert len(data["training"]["losses"]) == 2


def test_what_a_rank_refuses_is_told_as_it_said_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = "workbench.errors.WorkbenchError: rank 1 would run all_reduce, where rank 0 runs nothing more"
    said = RankError(f"rank 1 failed: {summary}", [Failure(1, "error", summary, "Traceback (most recent call last):")])
    late = RankError("ranks 0, 1 gave no answer within 0.2 s.", [Failure(rank, "busy", "busy") for rank in (0, 1)])
    monkeypatch.setattr(run_recipe, "run", Mock(side_effect=[said, late]))
    assert refused(capsys, "run", "llama3_fsdp", status=1) == (
        "rank 1: rank 1 would run all_reduce, where rank 0 runs nothing more")
    assert main(["run", "llama3_fsdp"]) == 1
    assert capsys.readouterr().err.startswith("workbench: error: ranks 0, 1 gave no answer within 0.2 s.\n")
