"""The user's code: import a file that registers passes, and collect a function's source with what the source uses."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import symtable
import sys
import textwrap
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from workbench.errors import WorkbenchError, no_exit


def import_file(path: Path) -> None:
    """Import a file as the module of its name, so that its passes and models are registered; ranks can import it too.

    Raises WorkbenchError for a missing file, for the name of another module, and, with the line, for errors in it.
    """
    path, name = path.absolute(), path.stem
    if not path.is_file() or path.suffix != ".py":
        raise WorkbenchError(f"{path}: " + ("is no .py file" if path.exists() else "no such file"))
    there = importlib.util.find_spec(name) if name.isidentifier() else None
    if not name.isidentifier() or (there is not None and Path(there.origin or "").resolve() != path.resolve()):
        raise WorkbenchError(f"{path}: {name!r} cannot be its name as a module, or is another's: rename the file")
    sys.path.insert(0, str(path.parent))
    with no_exit():
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, WorkbenchError) and str(path) in str(error):
                raise
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            where = f"{path}, line {lines[-1]}" if lines else str(path)
            raise WorkbenchError(f"{where}: {type(error).__name__}: {error}") from error


_OF_THE_MODULE = {*vars(ModuleType("")), "__file__", "__builtins__"}
"""Names that each module defines for itself: in the exported script they are the script's."""


class Sources:
    """Collects functions for a script: its lines of `imports`, and its `definitions` in order.

    A name that a function uses becomes an import where another module defines it, a literal where it is plain data, and
    a definition where the function's own module, or notebook, defines it. taken: names that the script uses already.
    """

    def __init__(self, taken: Collection[str] = ()) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self._taken = set(taken)
        self._known: dict[str, Any] = {}

    def add_function(self, function: Any, what: str) -> None:
        """Add a decorated function. Raises WorkbenchError, which begins with `what`, if it cannot be exported."""
        function = inspect.unwrap(function)
        name = getattr(function, "__name__", "")
        if getattr(function, "__closure__", None):
            names = ", ".join(map(repr, function.__code__.co_freevars))
            raise _refusal(what, f"it uses {names} of the function around it: define it at the top of its module")
        source = _source(function, what)
        tree = ast.parse(source).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise _refusal(what, "it is no function with a name: write a `def`")
        if not tree.decorator_list:
            raise _refusal(what, f"{name} was registered by a call: write the registration above it, as a decorator")
        self._claim(tree.name, function, what)
        self._take(source, tree.name, function.__globals__, what)

    def _claim(self, name: str, value: Any, what: str) -> None:
        if name in self._taken or self._known.get(name, value) is not value:
            raise _refusal(what, f"the script has another {name!r} already: rename one of them")
        self._known[name] = value

    def _take(self, source: str, name: str, given: dict[str, Any], what: str) -> None:
        needed = _free_names(source, annotations=False)
        for used in needed:
            if used == name or used in _OF_THE_MODULE or (used not in given and hasattr(builtins, used)):
                continue
            if used not in given:
                raise _refusal(what, f"it uses {used!r}, which is no name of its module: define it at the top")
            if self._known.get(used, self) is not given[used]:
                self._claim(used, given[used], what)
                self._resolve(used, given[used], given, what)
        for used in sorted(set(_free_names(source, annotations=True)) - {*needed, *self._known, *self._taken}):
            # for readers alone: the script never evaluates annotations of functions
            if used in given and (line := _import_line(used, given[used], given)):
                self._claim(used, given[used], what)
                self.imports.append(line)
        self.definitions.append(source.rstrip())

    def _resolve(self, name: str, value: Any, given: dict[str, Any], what: str) -> None:
        if line := _import_line(name, value, given):
            self.imports.append(line)
        elif _is_own(value, given) and (inspect.isfunction(value) or inspect.isclass(value)):
            if getattr(value, "__closure__", None) or value.__qualname__ != name:
                raise _refusal(what, f"it uses {name!r}, which was made inside another function: define it at the top")
            self._take(_source(value, what, given), name, given, what)
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}")
        elif assignment := _assignment(name, given):
            self._take(assignment, name, given, what)
        else:
            raise _refusal(what, f"it uses {name!r}, whose type is {type(value).__name__}: assign it once, at the top "
                                 "of its module, or make it inside the function")


def _is_own(value: Any, given: dict[str, Any]) -> bool:
    return getattr(value, "__module__", None) in (given.get("__name__"), "__main__")


def _import_line(name: str, value: Any, given: dict[str, Any]) -> str | None:
    """The line that imports a value; None if the user's module defines it, or no module holds it under its name."""
    if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:  # not so torch.ops.aten
        whole = value.__name__
        return f"import {whole}" if whole == name else f"import {whole} as {name}"
    parts = str(getattr(value, "__module__", "")).split(".")
    original = str(getattr(value, "__qualname__", "") or getattr(value, "__name__", ""))
    homes = (".".join(parts[: i + 1]) for i in range(len(parts)))  # torch.fx before torch.fx.node
    home = next((h for h in homes if getattr(sys.modules.get(h), original, None) is value), None)
    if home is None or _is_own(value, given):
        return None
    return f"from {home} import {original}" + (f" as {name}" if name != original else "")


def _refusal(what: str, why: str) -> WorkbenchError:
    return WorkbenchError(f"{what} cannot be exported: {why}")


def _source(value: Any, what: str, given: dict[str, Any] | None = None) -> str:
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        # for a notebook's cells Python finds the source of functions, but not of classes
        for cell in reversed((given or {}).get("In", [])):
            for node in _statements(cell):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
        raise _refusal(what, f"the source of {value.__name__!r} cannot be found: define it in a file or a cell of a "
                             "notebook") from None


def _statements(text: str) -> list[ast.stmt]:
    """The top-level statements of a module or a cell; none for a cell with a magic."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def _assignment(name: str, given: dict[str, Any]) -> str | None:
    """The statement that assigns to the name, if it is the only one of the module, or of the last cell with such a one.
    """
    module = sys.modules.get(str(given.get("__name__")))
    try:
        texts = list(reversed(given["In"])) if "In" in given else [inspect.getsource(module)] if module else []
    except (OSError, TypeError):
        texts = []
    for text in texts:
        found = [node for node in _statements(text) if isinstance(node, ast.Assign)
                 and any(isinstance(n, ast.Name) and n.id == name for target in node.targets for n in ast.walk(target))]
        if found:
            alone = len(found) == 1 and len(found[0].targets) == 1 and isinstance(found[0].targets[0], ast.Name)
            return ast.get_source_segment(text, found[0]) if alone else None
    return None


def _free_names(source: str, *, annotations: bool) -> list[str]:
    """The global names that a definition uses, sorted, with or without names in annotations of functions."""
    tree = ast.parse(source)
    for node in () if annotations else ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    found: set[str] = set()

    def walk(table: symtable.SymbolTable) -> None:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or (top and not symbol.is_assigned())):
                found.add(symbol.get_name())
        for child in table.get_children():
            walk(child)

    walk(symtable.symtable(ast.unparse(tree), "<export>", "exec"))
    return sorted(found)


def _is_plain(value: Any) -> bool:
    """Whether evaluating the value's repr gives an equal value: numbers, text, and containers of them."""
    try:
        return bool(eval(repr(value), {"__builtins__": {"frozenset": frozenset, "set": set}}) == value)
    except Exception:  # whatever its repr may be
        return False
