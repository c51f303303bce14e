"""How a command ends, with nothing left behind; and the files of a user that it imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.cli import main
from workbench.recipe.contracts import CONTRACTS
from workbench.tools.own_files import import_file

LEAVES = """
import multiprocessing, subprocess, threading, time
subprocess.Popen(["sleep", "60"])
multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
threading.Thread(target=time.sleep, args=(60,)).start()
"""
PASS_FILE = """\
from workbench import register_pass


@register_pass("marks", stage="joint", changes="nothing")
def marks(gm, example_inputs, *, options):
    return gm
"""


def ended(*command: str, stdout: int = subprocess.PIPE) -> tuple[int, str]:
    """The status and stderr, once all that held a pipe of the command have ended, within 30 s."""
    done = subprocess.run([sys.executable, "-m", "workbench", *command], stdout=stdout,
                          stderr=subprocess.PIPE, text=True, timeout=30)
    return done.returncode, done.stderr


def test_what_an_imported_file_leaves_running_does_not_hold_up_the_end(tmp_path: Path) -> None:
    file = tmp_path / "own_leaves.py"
    file.write_text(LEAVES)
    status, message = ended("run", "nope", "--import", str(file))
    assert status == 2 and message.startswith("workbench: error: recipe 'nope': no recipe")


def test_a_full_disk_behind_standard_output_is_a_sentence_and_a_reader_that_leaves_is_none() -> None:
    with open("/dev/full", "w") as full:
        assert ended("recipes", stdout=full.fileno()) == (
            1, "workbench: error: standard output cannot be written: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    assert ended("recipes", stdout=write) == (1, "")
    os.close(write)


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    file = tmp_path / "own_marks.py"
    file.write_text(PASS_FILE)
    import_file(file)
    import_file(file)
    assert CONTRACTS["marks"].source == "user" and sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("missing.py", None, "{}: no such file"),
    ("json.py", "", "{}: 'json' cannot be its name as a module, or is another's: rename the file"),
    ("own_names.py", "x = 1\ny = z\n", "{}, line 2: NameError: name 'z' is not defined"),
    ("own_open.py", "x = (1\n", "{}: SyntaxError: '(' was never closed (own_open.py, line 1)"),
])
def test_a_file_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert main(["run", "llama3", "--import", str(file)]) == 2
    assert capsys.readouterr().err == f"workbench: error: {message.format(file)}\n"
