"""Users' files: one sentence for what cannot be read, and results written whole or not at all. No torch here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError

STDOUT = "-"
"""As a path: standard output."""


def json_of(text: str | bytes) -> Any:
    """The value of JSON text. ValueError for all that cannot be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def regular(path: Path) -> Path:
    """`path`. OSError where it is a device or a pipe: reading from one may never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # reading a folder is an error by itself
        raise OSError(errno.EINVAL, "a device or a pipe, and no regular file", str(path))
    return path


@contextmanager
def reading(path: Path, noun: str, remedy: str) -> Iterator[None]:
    """Within this block, `path` is read, and its content is used: an error means that it is not a `noun`.

    Raises WorkbenchError, which ends with the remedy. FileNotFoundError passes through.
    """
    try:
        regular(path)
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
    except KeyError as error:
        why = f"it has no {error.args[0]!r}"
    except ValueError as error:
        why = str(error)
    except (TypeError, AttributeError, IndexError, OverflowError):
        why = "its values have other types"
    else:
        return
    raise WorkbenchError(f"{path}: not {noun} ({why}): {remedy}")


def write_whole(path: Path | str, content: str | bytes) -> None:
    """Write a file beside `path` and rename it, so that an error leaves the one that is there.

    WorkbenchError names the file that cannot be written. A device or a pipe, such as /dev/stdout, is written directly.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise WorkbenchError(f"{path}: cannot be written: {error.strerror}") from None


def course_folder(name: str) -> Path:
    """A folder that the course reads, such as "notebooks": in the installed `workbench_lessons`, or in the checkout.

    In a checkout `workbench_lessons` is a link to lessons, and the other folders are beside it.
    """
    root = Path(__file__).resolve().parents[2]
    installed = root / "workbench_lessons" / name
    return installed.resolve() if installed.is_dir() else root / name


def writable(path: Path | None, option: str = "--json") -> None:
    """Raise WorkbenchError where a file cannot be written, before the work is done. STDOUT always can."""
    if path is None or str(path) == STDOUT:
        return
    if path.is_dir():
        raise WorkbenchError(f"{option} {path}: is a folder: give a file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise WorkbenchError(
            f"{option} {path}: the folder {path.parent} does not exist: make it first"
        )
    if path.is_file() or not path.exists():  # a device is written as it is
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise WorkbenchError(f"{option} {path}: cannot be written: {error.strerror}") from None


def print_result(show: Callable[[], Any], path: Path | None, json: Callable[[], str]) -> None:
    """Print what `show` gives, and write the JSON to `path`, if given. STDOUT gets the JSON alone."""
    if str(path) == STDOUT:
        print(json(), end="")
        return
    print(show())
    if path is not None:
        write_whole(path, json())
