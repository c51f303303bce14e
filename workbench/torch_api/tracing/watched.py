"""What a forward read in Python, found again later: sources as Dynamo writes them, and the structure of a module.

A source begins at the model, `L['self']`, or at a Python module, `M['package.module']`; attributes and items follow.
`source.*` stands for all that an object holds. Source: torch/_dynamo/source.py.
"""

from __future__ import annotations

import enum
import functools
import inspect
import re
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from workbench.torch_api.module_paths import MODULES

GONE = object()
_CALL = object()  # of a weak reference
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, enum.Enum,
          FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)
_ROWS = (list, tuple, deque, set, frozenset)
_MOST = 1000
"""Larger containers are compared by identity."""
_ROOT = re.compile(rf"^(?:L\['self'\]|M\['(?P<home>[\w.]+)'\])(?P<path>(?:{MODULES})*)(?P<rest>.*)$")
_STEP = re.compile(r"\.(\w+)|\[((?:b?'[^']*')|\d+)\]|(\(\))")
_GATHERS = ".workbench_gathers"  # of SimpleFSDP, which no forward changes
_CLASS = re.compile(r"^dict\(type\((.*)\)\.__dict__\)\['(\w+)'\]$")
_OF_DICT = re.compile(r"\.__dict__\['(\w+)'\]")
_GLOBAL = re.compile(r"^G\['([^']+)'\](.*)$")
_IMPORTED = "__import_"
_TORCHS = {name for name in (*dir(nn.Module), *vars(nn.Module())) if name.startswith("_")}
"""Attributes of every module, of which `Structure` watches what matters."""


def named_sources(read: Iterable[str], module_in: Mapping[str, Any], scope: Mapping[str, Any]) -> Iterator[str]:
    """Dynamo's sources with roots that can be found without its frame.

    module_in: the traced frame's variables, one of which is the model or a tuple that begins with it. scope: its
    global variables.
    """
    model = next((f"L['{name}']{at}" for name, held in module_in.items()
                  for at, value in (("", held), ("[0]", next(iter(held), None) if isinstance(held, tuple) else None))
                  if isinstance(value, nn.Module)), "L['self']")
    for source in read:
        found = _CLASS.match(source)
        text = _OF_DICT.sub(r".\1", f"{found[1]}.{found[2]}" if found else source)
        if text.startswith(model):
            yield f"L['self']{text.removeprefix(model)}"
        elif (held := _GLOBAL.match(text)) and held[1].startswith(_IMPORTED):
            yield f"M['{held[1].removeprefix(_IMPORTED).replace('_dot_', '.')}']{held[2]}"
        elif held and held[1] in scope and not held[1].startswith("__"):
            yield f"M['{scope['__name__']}'].{held[1]}{held[2]}"


class Watched:
    """What one source leads to: `owner` is the path of the module or the name of the Python module where it begins.

    kept: a copy of the value as it was when this was made; GONE where there was none.
    """

    def __init__(self, root: Any, owner: str, name: str, steps: tuple[Any, ...]):
        self.root, self.owner, self.name, self._steps = root, owner, name, steps
        self.kept = _copy(self.now())

    @property
    def of_model(self) -> bool:
        return isinstance(self.root, nn.Module)

    def now(self) -> Any:
        value = self.root
        try:
            for named, step in self._steps:
                value = _step(value, named, step)
        except (AttributeError, LookupError, TypeError, ValueError):
            return GONE
        return value

    def changed(self) -> bool:
        now = self.now()
        return now is not self.kept and not _same(self.kept, now)


def watched(module: nn.Module, read: Iterable[str]) -> list[Watched]:
    """What can be compared of these sources: numbers, names, functions, and containers of them.

    Modules whose paths differ in numbers alone, as `layers.0` and `layers.1` do, count as one.
    """
    read = set(read)
    parts: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, part in module.named_modules():
        parts.setdefault(_alike(path), []).append((path, part))
    found: dict[tuple[str, str, bool], Watched] = {}
    for source in sorted(read):
        if not (at := _ROOT.match(source)) or (steps := _steps(at['rest'])) is None or at['rest'].startswith(_GATHERS):
            continue
        path = ".".join(re.findall(MODULES, at['path']))
        roots = [(at['home'], sys.modules.get(at['home']))] if at['home'] else parts.get(_alike(path), [])
        for owner, root in roots:
            name = at['rest'].lstrip(".")
            if root is not None and _comparable(root, steps, f"{source}.*" in read):
                found[owner, name, bool(at['home'])] = Watched(root, owner, name, steps)
    return [*found.values()]


def _alike(path: str) -> str:
    return re.sub(r"\d+", "#", path)


@functools.cache
def _steps(text: str) -> tuple[tuple[bool, Any], ...] | None:
    """The attributes (True, name) and items (False, key or _CALL) of a source; None for what is not made of them."""
    found = [*_STEP.finditer(text)]
    if not found or "".join(m[0] for m in found) != text or found[0][1] in _TORCHS:
        return None
    return tuple((True, m[1]) if m[1] else (False, _key(m[2])) if m[2] else (False, _CALL) for m in found)


def _step(value: Any, named: bool, step: Any) -> Any:
    if named:
        return getattr(value, step)
    if step is _CALL:
        return value() if isinstance(value, weakref.ref) else GONE
    return value[step]


def _key(text: str) -> Any:
    return int(text) if text.isdigit() else text[2:-1].encode() if text.startswith("b") else text[1:-1]


def _comparable(root: Any, steps: tuple[tuple[bool, Any], ...], whole: bool) -> bool:
    """whole: whether a dictionary there is watched, and not only those of its items that have sources."""
    value, last = root, root
    for named, step in steps:
        last = value
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch":
            return False
        if named and isinstance(inspect.getattr_static(type(value), step, None), property | functools.cached_property):
            return False  # to read it is to run it
        try:
            value = _step(value, named, step)
        except (AttributeError, LookupError, TypeError, ValueError):
            value = GONE
            break
    if value is GONE:
        return not isinstance(last, ModuleType) and not str(steps[-1][1]).startswith("_")
    return isinstance(value, (*_PLAIN, *_ROWS, np.ndarray)) or (whole and isinstance(value, dict))


def _copy(value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if not isinstance(value, (*_ROWS, dict)) or len(value) > _MOST or depth > 4:
        return value
    if isinstance(value, dict):
        return {key: _copy(held, depth + 1) for key, held in value.items()}
    return (set if isinstance(value, set | frozenset) else list)(_copy(held, depth + 1) for held in value)


def _same(was: Any, now: Any) -> bool:
    """Whether `now` is what `_copy` made `was` of, in its values."""
    if was is now:
        return True
    if isinstance(now, np.ndarray) and isinstance(was, np.ndarray):
        return np.array_equal(was, now)
    if isinstance(was, dict) and isinstance(now, dict):
        held = dict(now.items())  # not `now[key]`: a subclass may make something new at each
        return was.keys() == held.keys() and all(_same(value, held[key]) for key, value in was.items())
    if isinstance(was, list) and isinstance(now, list | tuple | deque):
        return len(was) == len(now) and all(map(_same, was, now))
    if isinstance(was, set) and isinstance(now, set | frozenset):
        return was == now
    return type(was) is type(now) and isinstance(was, _PLAIN) and bool(was == now)


class Structure:
    """The submodules, hooks, class and names of tensors of a module; and hooks on all modules."""

    def __init__(self, module: nn.Module):
        self._kept = [(path, part, _aspects(part)) for path, part in module.named_modules()]
        self._hooks = _hooks_of_all()

    def change(self) -> tuple[str, str]:
        """The first module that is another now, and what of it; "" and "" if none is."""
        for path, part, kept in self._kept:
            if (now := _aspects(part)) != kept:
                return path, next(name for name, was, read in zip(_ASPECTS, kept, now, strict=True) if was != read)
        return ("", "hooks on all modules") if _hooks_of_all() != self._hooks else ("", "")


_ASPECTS = ("class", "forward method", "submodules", "hooks", "parameters", "buffers")


def _aspects(part: nn.Module) -> tuple[Any, ...]:
    """What of a module's structure no step may change: read before each step, and so from its dictionary at once."""
    held = part.__dict__
    return (part.__class__, held.get("forward"), [*held["_modules"].items()],
            (*held["_forward_hooks"], *held["_forward_pre_hooks"], *held["_backward_hooks"],
             *held["_backward_pre_hooks"]), _kinds(held["_parameters"]), _kinds(held["_buffers"]))


def _kinds(tensors: dict[str, torch.Tensor | None]) -> list[tuple[Any, ...]] | None:
    return [(name, t.dtype, t.shape) for name, t in tensors.items() if t is not None] if tensors else None


def _hooks_of_all() -> list[int]:
    own: Any = nn.modules.module
    return [*own._global_forward_hooks, *own._global_forward_pre_hooks, *own._global_backward_hooks,
            *own._global_backward_pre_hooks]


def settings_of(device: str) -> dict[str, Any]:
    """torch's settings that change what an operator computes. device: its type, such as "cpu"."""
    mixed = torch.is_autocast_enabled(device)
    return {"default dtype": torch.get_default_dtype(), "autocast": torch.get_autocast_dtype(device) if mixed else None}
