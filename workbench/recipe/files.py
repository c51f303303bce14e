"""Users' files: one sentence for what cannot be read, and results written whole or not at all. No torch here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError


def json_of(text: str | bytes) -> Any:
    """The value of JSON text. ValueError for all that cannot be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def reading(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Within this block, `path` is read, and what it holds is used: an error means that it is no `what`.

    Raises WorkbenchError, which ends with the remedy. FileNotFoundError passes through.
    """
    try:
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
    raise WorkbenchError(f"{path}: not {what} ({why}): {remedy}")


def write_whole(path: Path | str, text: str) -> None:
    """Write a file, or leave the one that is there. WorkbenchError names the file that cannot be written."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # /dev/stdout, or a pipe
        target.write_text(text, encoding="utf-8")
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise WorkbenchError(f"{path}: cannot be written: {error.strerror}") from None


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON object of each line of a file of results."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
