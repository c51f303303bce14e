"""The one error type that users see: a message that names what is wrong and what to do."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path


class WorkbenchError(Exception):
    """Bad input or an unsupported machine. The command line prints its message and no traceback."""


class NotAlike(WorkbenchError):
    """Blocks that a capture cannot take for copies of one another; the message says in what they differ."""


_LIBRARY = ("<frozen ", sysconfig.get_path("stdlib"))
_PACKAGE = str(Path(__file__).parent)


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
