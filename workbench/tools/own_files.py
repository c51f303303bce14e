"""Import a user's file, which registers passes or models, and the files that it imports. Imports no torch."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Iterator
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


def imports_of(source: str, package: str) -> dict[str, Path]:
    """The user's own modules, by name, that a source in `package` imports, and those that these import in turn.

    What is installed is left out, and so are Python, torch and this package. Imports by string are not seen.
    """
    files, todo = dict[str, Path](), list[tuple[str | bytes, str]]([(source, package)])
    while todo:
        for name in _imports(*todo.pop()):
            for end in range(1, name.count(".") + 2):
                module = ".".join(name.split(".")[:end])
                place = _place(module)
                if not place:
                    break
                if module not in files and place.endswith(".py"):
                    file = files[module] = Path(place)
                    inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
                    todo.append((file.read_bytes(), inside))
    return files


def _imports(source: str | bytes, package: str) -> Iterator[str]:
    """Names that a source imports: of modules, and of what may be one. None of a source that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # changed since it was imported: its bytes tell
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            start = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _place(module: str) -> str:
    """The file of a module of the user's own, or the folder of a package without `__init__`; "" for others."""
    if module.partition(".")[0] in {*sys.stdlib_module_names, "torch", "workbench"}:
        return ""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a name in a module, or `__main__`
        return ""
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    place = next(filter(None, places), "")
    return "" if "-packages/" in place else place
