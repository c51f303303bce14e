"""The one error type that users see: a message that names what is wrong and what to do."""

from __future__ import annotations

import contextlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path


class WorkbenchError(Exception):
    """Bad input or an unsupported machine. The command line prints its message and no traceback."""


class NotAlike(WorkbenchError):
    """Blocks that a capture cannot take for copies of one another; the message says in what they differ."""


class UnusableGraph(WorkbenchError):
    """`passed`, a pass, left a graph that no later stage can take; `problem` is what lint says of it."""

    def __init__(self, passed: str, problem: str) -> None:
        super().__init__(passed, problem)
        self.passed, self.problem = passed, problem

    def __str__(self) -> str:
        return f"pass {self.passed!r} left a graph that the next stage cannot use: {self.problem}"


_LIBRARY = ("<frozen ", sysconfig.get_path("stdlib"))
_PACKAGE = str(Path(__file__).parent)


def place_of(error: BaseException) -> str:
    """` (FILE, line N, in FUNCTION: SOURCE)` of the last line of a user's that an error went through; "" if none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*_LIBRARY, _PACKAGE))
              and "site-packages" not in f.filename]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({_file(last.filename)}, line {last.lineno}, in {last.name}: {last.line})"


def _file(name: str) -> str:
    """`Cell In[3]` for a notebook's cell, as IPython calls it; any other file by its name."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(name) if shell is not None else None
    return " ".join(cell) if cell else name


@contextlib.contextmanager
def no_exit(what: str = "") -> Iterator[None]:
    """Around code of a user's: `sys.exit` in it would end the process, as if all had gone well. As a decorator, too.

    Raises WorkbenchError with file and line, `what` in front. An exit of the package's own goes on.
    """
    try:
        yield
    except SystemExit as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__)
                  if "site-packages" in f.filename or not f.filename.startswith(_LIBRARY)]
        if not frames or frames[-1].filename.startswith(_PACKAGE):
            raise
        where = f"{what}: {frames[-1].filename}" if what else frames[-1].filename
        code = "" if error.code is None else repr(error.code)
        raise WorkbenchError(f"{where}, line {frames[-1].lineno}: sys.exit({code}) would end the whole process: raise "
                             "an error instead, or return") from error
