"""Fingerprints of code and data as loaded in this process: the keys of a cache of results."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib
import itertools
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from workbench.torch_api.ops import OPERATORS

_SIMPLE = (bool, int, float, complex, str, bytes, range, slice, re.Pattern, Path, torch.dtype, torch.device,
           torch.Size, types.EllipsisType, types.NoneType, *OPERATORS)
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_IMPORT = dis.opmap["IMPORT_NAME"]


def fingerprint(*things: Any) -> str:
    """SHA-256, in hex, of functions, classes and data; equal where none of the following differs.

    Of a function: its bytecode, line, defaults and closure, and the functions, classes and data that it names, through
    all modules but libraries. Nothing is read from disk, so that functions redefined in a cell, or patched, count as
    they are now. Libraries count by name: hash their versions too. Objects without code or data of their own count by
    identity. Not included: files that code reads, names that are computed at run time, settings of torch.
    """
    return _Walk().digest(things)


@functools.cache
def _is_library(module: str) -> bool:
    top = module.partition(".")[0]
    if top in ("", "workbench", "__main__"):
        return False
    if top in sys.stdlib_module_names or top == "torch":  # torch may be a checkout
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


_serials: dict[int, tuple[Callable[[], Any], int]] = {}
_numbers = itertools.count()


def _serial(value: Any) -> int | str:
    """A number that is unique to this object for the whole process; the text of a plain value, such as a Fraction."""
    found = _serials.get(id(value))
    if found is None or found[0]() is not value:
        try:
            found = _serials[id(value)] = weakref.ref(value), next(_numbers)
        except TypeError:
            if " at 0x" not in (text := repr(value)):
                return text
            found = _serials[id(value)] = (lambda: value), next(_numbers)  # kept alive: ids are used again
    return found[1]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _imported(code: types.CodeType, package: str | None) -> Iterator[types.ModuleType]:
    """Modules that the code imports when it runs, without libraries and modules that cannot be imported here."""
    if _IMPORT not in code.co_code[::2]:
        return
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        if instruction.opname != "IMPORT_NAME":
            continue
        name = "." * instructions[i - 2].argval + instruction.argval  # level, names, then the import
        if name.startswith(".") or not _is_library(name):
            with suppress(Exception):  # its branch may never run
                yield importlib.import_module(name, package)


class _Walk:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # keeps ids unique during the walk

    def digest(self, things: Any) -> str:
        for thing in things:
            self.add(thing)
        return self.hash.hexdigest()

    def write(self, *words: Any) -> None:
        self.hash.update(repr(words).encode())

    def add(self, value: Any) -> None:
        if isinstance(value, enum.Enum):
            self.write("member", type(value).__qualname__, value.name)
            self.add(value.value)
        elif isinstance(value, _SIMPLE):
            self.write(type(value).__name__, repr(value))
        elif id(value) in self.seen:
            self.write("again", self.seen[id(value)])
        else:
            self.seen[id(value)] = len(self.seen)
            self.alive.append(value)
            self._compound(value)

    def _compound(self, value: Any) -> None:
        if isinstance(value, list | tuple):
            self.write(type(value).__name__, len(value))
            for item in value:
                self.add(item)
        elif isinstance(value, set | frozenset):
            self.write("set", sorted(map(self._apart, value)))
        elif isinstance(value, dict | types.MappingProxyType):
            self.write("dict", len(value))
            for key, item in value.items():
                self.add(key)
                self.add(item)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self.write("module", value.__name__)
        else:
            self._object(value)

    def _apart(self, item: Any) -> str:
        """The digest of one item of a set; it may refer to objects that the walk has met before the set."""
        walk = _Walk()
        walk.seen, walk.alive = dict(self.seen), self.alive
        return walk.digest([item])

    def _function(self, function: types.FunctionType) -> None:
        library = _is_library(function.__module__ or "")
        self.write("function", function.__module__, function.__qualname__)
        if library:
            return
        code = function.__code__
        names: dict[str, None] = {}
        for part in _codes(code):
            names |= dict.fromkeys(part.co_names)
            self.write(part.co_code, part.co_names, part.co_varnames, part.co_freevars, part.co_firstlineno,
                     part.co_exceptiontable)
            for constant in part.co_consts:
                if not isinstance(constant, types.CodeType):
                    self.add(constant)
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                self.add(cell.cell_contents)
        for name in names:
            if name in function.__globals__:
                self._named(name, function.__globals__[name], names)
        for part in _codes(code):
            for module in _imported(part, function.__globals__.get("__package__")):
                self._named(module.__name__, module, names)

    def _named(self, name: str, value: Any, names: dict[str, None], through: tuple[Any, ...] = ()) -> None:
        self.write("names", name)
        self.add(value)
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__) and value not in through:
            held = vars(value)
            for attribute in names:
                if attribute in held:
                    self._named(attribute, held[attribute], names, (*through, value))

    def _class(self, kind: type) -> None:
        self.write("class", kind.__module__, kind.__qualname__)
        if _is_library(kind.__module__):
            return
        for base in kind.__bases__:
            self.add(base)
        for name, value in vars(kind).items():
            if isinstance(value, _METHODS) or not name.startswith(("__", "_abc_")):  # Python adds those, some later
                self.write("has", name)
                self.add(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, staticmethod | classmethod | types.MethodType):
            self.write(type(value).__name__)
            self.add(value.__func__)
            self.add(getattr(value, "__self__", None))
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self.add(function)
        elif isinstance(value, functools.partial):
            self.write("partial")
            for part in (value.func, value.args, value.keywords):
                self.add(part)
        elif isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            self.write("wraps")
            self.add(value.__wrapped__)
        elif isinstance(value, functools.cached_property):
            self.add(value.func)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
            self.write("builtin", getattr(value, "__module__", ""), value.__qualname__)
        elif isinstance(value, types.SimpleNamespace):
            self.add(vars(value))
        elif _is_library(type(value).__module__) or (state := object.__getstate__(value)) is None:
            self.write("object", type(value).__qualname__, _serial(value))
        else:
            self.add(type(value))
            self.add(state)  # attributes, in slots too
