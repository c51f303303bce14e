"""The base of all errors that users see: the message names what is wrong and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


class WorkbenchError(Exception):
    """Bad input or an unsupported machine. The command line prints its message and no traceback."""


class UnusableGraph(WorkbenchError):
    """The pass `passed` left a graph that no later stage can use; `problem` is the message of lint, or of `check`.

    ranks: those with such a graph, where every rank raises this error; empty where this rank raises it by itself.
    """

    def __init__(
        self, passed: str, problem: str, check: str = "lint", ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(passed, problem, check, ranks)
        self.passed, self.problem, self.check, self.ranks = passed, problem, check, ranks

    def __str__(self) -> str:
        where = f" on rank {self.ranks[0]}" if len(self.ranks) == 1 else ""
        return f"pass {self.passed!r} left a graph{where} that the next stage cannot use: {self.problem}"


_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)]
_LIBRARY = ("<frozen ", sysconfig.get_path("stdlib"))
_PACKAGE = str(Path(__file__).parent)


def is_library(file: str) -> bool:
    """Whether a source file belongs to Python or an installed package. A generated graph does not."""
    return not file.startswith("<eval_with_key>") and (
        file.startswith(_LIBRARY) or any(f"/{name}-packages/" in file for name in ("site", "dist")))


def place_of(error: BaseException) -> str:
    """` (FILE, line N, in FUNCTION: SOURCE)` of the innermost line of user code in the traceback; "" if none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__)
              if not is_library(f.filename) and not f.filename.startswith(_PACKAGE)]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({shown_file(last.filename)}, line {last.lineno}, in {last.name}: {last.line})"


def shown_file(name: str) -> str:
    """`Cell In[3]` for a notebook's cell, as IPython calls it; other files by name."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(name) if shell is not None else None
    return " ".join(cell) if cell else name


@contextlib.contextmanager
def no_exit(subject: str = "") -> Iterator[None]:
    """Around user code, as a context or a decorator: `sys.exit` there would end the process as if all had gone well.

    Raises WorkbenchError with file and line instead, after `subject`. An exit by the package itself passes through.
    """
    try:
        yield
    except SystemExit as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__)
                  if "site-packages" in f.filename or not f.filename.startswith(_LIBRARY)]
        if not frames or frames[-1].filename.startswith(_PACKAGE):
            raise
        where = f"{subject}: {frames[-1].filename}" if subject else frames[-1].filename
        code = "" if error.code is None else repr(error.code)
        raise WorkbenchError(
            f"{where}, line {frames[-1].lineno}: sys.exit({code}) would end the whole process: raise "
            "an error instead, or return"
        ) from error


def temporary(make: Callable[[], Made]) -> Made:
    """What `make` makes: a temporary file or folder. WorkbenchError where that is impossible."""
    try:
        return make()
    except OSError as error:
        problem = (
            f"no temporary file can be made in {tempfile.tempdir or 'any folder'}: {error.strerror}"
        )
        raise WorkbenchError(
            f"{problem}: make that folder, free space in it, or set TMPDIR to another"
        ) from None


def full_disk(message: str) -> str:
    """The words in a message of Inductor, g++ or a library that tell of a full disk; "" where it tells of none."""
    return next((words for words in _FULL if words in message), "")
