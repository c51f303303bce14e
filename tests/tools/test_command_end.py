"""How a command ends: with a status that only a finished one has, in one sentence, and with nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LEFT = {
    "a thread": "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\n",
    "a process": "import multiprocessing\n"
                 "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()\n",
    "a program": "import subprocess\nsubprocess.Popen(['sleep', '60'])\n",
}


def ended(*command: str, stdout: int = subprocess.PIPE) -> tuple[int, str, float]:
    """The status, stderr, and the seconds until all that held a pipe of the command had ended."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "workbench", *command], stdout=stdout, stderr=subprocess.PIPE,
                          text=True, timeout=50)
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.parametrize("what", LEFT)
def test_what_an_imported_file_leaves_running_does_not_hold_up_the_end(what: str, tmp_path: Path) -> None:
    file = tmp_path / "own_leaves.py"
    file.write_text(f"import time\n{LEFT[what]}")
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
