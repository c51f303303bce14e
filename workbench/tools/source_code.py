"""Code of the user's: a function's source with what it uses of its module, and a file that registers passes."""

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
    """Import a file as the module of its name, for the passes and models that it registers; ranks import it likewise.

    Raises WorkbenchError where there is none, where another module has its name, and with the line where it fails.
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
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            where = f"{path}, line {lines[-1]}" if lines else str(path)
            raise WorkbenchError(f"{where}: {type(error).__name__}: {error}") from error


_OF_THE_MODULE = {*vars(ModuleType("")), "__file__", "__builtins__"}
"""What each module has of its own: of the script, where its code stands."""


class Sources:
    """Collects functions: `imports` are lines, `definitions` texts in the order in which they must stand.

    What a function names is imported where another module has it, written out where it is plain data, and included
    where the function's own module, or notebook, defines it. `taken`: names that the script has already.
    """

    def __init__(self, taken: Collection[str] = ()) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self._taken = set(taken)
        self._known: dict[str, Any] = {}

    def add_function(self, function: Any, what: str) -> None:
        """A decorated function. Raises WorkbenchError, which begins with `what`, where it cannot be taken along."""
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
            # for who reads: the script evaluates no annotation of a function
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
    """How a script gets what its own module did not define; None where it did, or no module has it by its name."""
    if isinstance(value, ModuleType) and sys.modules.get(value.__name__) is value:  # torch.ops.aten is none to import
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
        # Python finds the source of a function that a cell defined, and not that of a class
        for cell in reversed((given or {}).get("In", [])):
            for node in _statements(cell):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__:
                    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                    return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
        raise _refusal(what, f"the source of {value.__name__!r} cannot be found: define it in a file or a cell of a "
                             "notebook") from None


def _statements(text: str) -> list[ast.stmt]:
    """Those at the top of a module or a cell; none of a cell with a magic."""
    try:
        return ast.parse(text).body
    except SyntaxError:
        return []


def _assignment(name: str, given: dict[str, Any]) -> str | None:
    """The one statement of the module, or of the last cell that has one, that assigns to the name alone."""
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
    """The module's names that a definition uses, sorted, with or without those that only annotate functions."""
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
    """Whether Python reads what it writes of the value: numbers, text, and containers of them."""
    try:
        return bool(eval(repr(value), {"__builtins__": {"frozenset": frozenset, "set": set}}) == value)
    except Exception:  # whatever its repr may be
        return False
