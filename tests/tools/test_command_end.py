"""How a command ends, with nothing left behind; and the files of a user that it imports."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.passes import registry
from workbench.recipe.contracts import CONTRACTS
from workbench.tools.own_files import import_file

LEAVES = """
import multiprocessing, subprocess, threading, time
subprocess.Popen(["sleep", "60"])
multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
threading.Thread(target=time.sleep, args=(60,)).start()
"""


def ended(*command: str, stdout: int = subprocess.PIPE) -> tuple[int, str, float]:
    """The status, stderr, and the seconds until all that held a pipe of the command had ended."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "workbench", *command], stdout=stdout, stderr=subprocess.PIPE,
                          text=True, timeout=50)
    return done.returncode, done.stderr, time.monotonic() - began


def test_what_an_imported_file_leaves_running_does_not_hold_up_the_end(tmp_path: Path) -> None:
    file = tmp_path / "own_leaves.py"
    file.write_text(LEAVES)
    status, said, seconds = ended("run", "nope", "--import", str(file))
    assert status == 2 and said.startswith("workbench: error: recipe 'nope': no recipe") and seconds < 30


def test_a_full_disk_behind_standard_output_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        status, said, _ = ended("recipes", stdout=full.fileno())
    assert (status, said) == (1, "workbench: error: standard output cannot be written: No space left on device\n")


def test_a_reader_that_leaves_is_no_error_message() -> None:
    read, write = os.pipe()
    os.close(read)
    status, said, _ = ended("recipes", stdout=write)
    os.close(write)
    assert (status, said) == (1, "")


# The user's files: imported once, and refused by name.

PASS_FILE = """\
from workbench import register_pass

MARK = "seen"


@register_pass("marks", stage="joint", changes="a mark on the first node")
def marks(gm, example_inputs, *, options):
    next(iter(gm.graph.nodes)).meta[MARK] = True
    return gm
"""


@pytest.fixture(autouse=True)
def marks_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_passes", None), CONTRACTS.pop("marks", None), registry._PASSES.pop("marks", None)


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "own_passes.py"
    file.write_text(PASS_FILE)
    import_file(file)
    import_file(file)  # it is there already
    assert CONTRACTS["marks"].source == "user" and sys.path[0] == str(tmp_path)


def test_a_file_that_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, message in [
        ("missing.py", None, "{}: no such file"),
        ("json.py", "", "{}: 'json' cannot be its name as a module, or is another's: rename the file"),
        ("own_passes.py", "x = 1\ny = z\n", "{}, line 2: NameError: name 'z' is not defined"),
        ("own_passes.py", "x = (1\n", "{}: SyntaxError: '(' was never closed (own_passes.py, line 1)"),
    ]:
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        assert main(["run", "llama3", "--import", str(file)]) == 2
        assert capsys.readouterr().err == f"workbench: error: {message.format(file)}\n"
