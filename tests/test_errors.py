"""Code of a user's that would end the process is an error with its file and line, wherever it runs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import FSDP4, small, user_pass
from torch.fx import GraphModule
from torch.nn import Linear

from workbench import Effect, RankError, build, capture, load_recipe, register_model, run_joint
from workbench.authoring.author import author, author_module
from workbench.cli import main
from workbench.errors import WorkbenchError
from workbench_lessons.course.grading import grade

HERE = Path(__file__)


def test_an_imported_file_that_exits_is_refused_and_an_interrupt_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file, other = tmp_path / "own_exits.py", tmp_path / "own_interrupts.py"
    file.write_text("x = 1\nimport argparse; argparse.ArgumentParser(prog='p').parse_args(['--help'])\n")
    says = f"{file}, line 2: sys.exit(0) would end the whole process: raise an error instead, or return"
    assert main(["run", "llama3", "--world", "fake", "--import", str(file)]) == 2
    assert capsys.readouterr().err == f"workbench: error: {says}\n"
    other.write_text("raise KeyboardInterrupt\n")
    assert main(["run", "llama3", "--world", "fake", "--import", str(other)]) == 130


def test_the_package_itself_may_exit() -> None:
    """As on a SIGTERM: the frame that raises is the package's."""
    script = ("import os, signal\nfrom workbench.errors import no_exit\n"
              "from workbench_lessons.course.whole_course import ending_on_sigterm\n"
              "with no_exit(), ending_on_sigterm():\n    os.kill(os.getpid(), signal.SIGTERM)\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 128 + 15 and done.stderr == ""


def exits(*_: Any, **__: Any) -> Any:
    sys.exit(0)


SAYS = f"{HERE}, line {exits.__code__.co_firstlineno + 1}: sys.exit(0) would end the whole process"


@pytest.mark.integration
def test_a_pass_or_its_effect_that_exits_is_named(fake4: Any) -> None:
    linear = author_module(Linear(4, 4), fake4, None, batch=lambda: (torch.ones(2, 4),))

    def tags(gm: GraphModule) -> GraphModule:
        next(iter(gm.graph.nodes)).meta["mine"] = True
        return gm

    with user_pass("exits", lambda gm: exits()) as mine, pytest.raises(WorkbenchError) as caught:
        run_joint(capture(linear), [mine])
    assert str(caught.value).startswith(f"pass 'exits' on the joint graph: {SAYS}")
    with user_pass("exits", tags, effect=exits) as mine, pytest.raises(WorkbenchError) as caught:
        _ = run_joint(capture(linear), [mine])[0].verdicts
    assert str(caught.value).startswith(SAYS)
    given: dict[str, Any] = {"effect": lambda *_: Effect(True, "", {}), "partition_effect": exits}
    with user_pass("exits", tags, **given) as mine, pytest.raises(WorkbenchError) as caught:
        build(small(FSDP4, (mine,)), fake4)
    assert str(caught.value).startswith(SAYS)


@pytest.mark.integration
def test_a_family_or_a_grader_that_exits_is_refused(fake4: Any) -> None:
    register_model("exiting", sizes={"vocab_size": 256, "max_seq_len": 64})(exits)
    recipe = load_recipe("llama3").override({"model.family": "exiting", "mesh.dp_shard": 4, "mesh.tp": 1})
    with pytest.raises(WorkbenchError) as caught:
        author(recipe, fake4)
    assert str(caught.value).startswith(SAYS)
    with pytest.raises(WorkbenchError) as caught:
        grade(f"{__name__}:exits", 1, {})
    assert str(caught.value).startswith(SAYS)


@pytest.mark.ranks
def test_a_function_on_ranks_that_exits_is_an_error(pool2: Any) -> None:
    def leaves() -> None:
        sys.exit(0)

    with pytest.raises(RankError) as caught:
        pool2.run(leaves)
    assert "SystemExit: 0" in str(caught.value) and str(HERE) in str(caught.value)
    assert pool2.run(lambda: 1) == [1, 1]
