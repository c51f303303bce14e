"""Import a user's file, which registers passes or models. Imports no torch."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from workbench.errors import WorkbenchError, no_exit
from workbench.recipe.plugins import known_on_ranks

_FILES: dict[str, Path] = {}


def import_file(path: Path) -> None:
    """Import a file as the module of its name: it registers passes and models, or patches something.

    The ranks of each pool import it too, before their next call.

    Raises WorkbenchError for a missing file, for the name of another module, and, with the line, for errors in it.
    """
    path, name = path.absolute(), path.stem
    if not path.is_file() or path.suffix != ".py":
        raise WorkbenchError(f"{path}: " + ("is no .py file" if path.exists() else "no such file"))
    there = importlib.util.find_spec(name) if name.isidentifier() else None
    if not name.isidentifier() or (
        there is not None and Path(there.origin or "").resolve() != path.resolve()
    ):
        raise WorkbenchError(
            f"{path}: {name!r} cannot be its name as a module, or is another's: rename the file"
        )
    sys.path.insert(0, str(path.parent))
    with no_exit():
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, WorkbenchError) and str(path) in str(error):
                raise
            lines = [
                frame.lineno
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == str(path)
            ]
            where = f"{path}, line {lines[-1]}" if lines else str(path)
            raise WorkbenchError(f"{where}: {type(error).__name__}: {error}") from error
    _FILES[name] = path


def import_files(paths: Iterable[Path]) -> None:
    """`import_file` of each."""
    for path in paths:
        import_file(path)


known_on_ranks("file", lambda: list(_FILES.values()), import_files)
