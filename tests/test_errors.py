"""Code of a user's that would end the process is an error with its file and line, wherever it runs."""

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import calls, scale, user_pass
from torch.nn import Linear

from workbench import RankError, capture, load_recipe, register_model, run_joint
from workbench.authoring.author import author, author_module
from workbench.cli import main
from workbench.errors import WorkbenchError, no_exit
from workbench_lessons.course.grading import grade
from workbench_lessons.course.whole_course import ending_on_sigterm

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
    with pytest.raises(SystemExit) as end, no_exit(), ending_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + 15


def exits(*_: Any, **__: Any) -> Any:
    sys.exit(0)


SAYS = re.escape(f"{HERE}, line {exits.__code__.co_firstlineno + 1}: sys.exit(0) would end the whole process")


@pytest.mark.integration
def test_a_pass_or_its_effect_that_exits_is_named(fake4: Any) -> None:
    joint = capture(author_module(Linear(4, 4), fake4, None, batch=lambda: (torch.ones(2, 4),)))
    with (user_pass("exits", exits) as mine,
          pytest.raises(WorkbenchError, match=f"^pass 'exits' on the joint graph: {SAYS}")):
        run_joint(joint, [mine])
    with (user_pass("exits", lambda gm: scale(gm, calls(gm)[0], 2.0), effect=exits) as mine,
          pytest.raises(WorkbenchError, match=f"^{SAYS}")):
        run_joint(joint, [mine])


@pytest.mark.integration
def test_a_family_or_a_grader_that_exits_is_refused(fake4: Any) -> None:
    register_model("exiting", sizes={"vocab_size": 256, "max_seq_len": 64})(exits)
    recipe = load_recipe("llama3").override({"model.family": "exiting", "mesh.dp_shard": 4, "mesh.tp": 1})
    with pytest.raises(WorkbenchError, match=f"^{SAYS}"):
        author(recipe, fake4)
    with pytest.raises(WorkbenchError, match=f"^{SAYS}"):
        grade(f"{__name__}:exits", 1, {})


@pytest.mark.ranks
def test_a_function_on_ranks_that_exits_is_an_error(pool2: Any) -> None:
    with pytest.raises(RankError, match=f"SystemExit: 0(.|\n)*{re.escape(str(HERE))}"):
        pool2.run(exits)
    assert pool2.run(lambda: 1) == [1, 1]
