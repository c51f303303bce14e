"""The plain attributes of a module and its parts: what its forward changes in Python, and a compiled step does not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

Attributes = dict[str, Any]
_DEPTH = 4


def module_attributes(module: nn.Module) -> Attributes:
    """Copies of the attributes of all parts by name, such as "layers.0.count"; not of torch's own.

    Lists, tuples, sets, dictionaries and arrays are copied to a depth of 4; all else is what it is.
    """
    attributes = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                attributes[f"{path}.{name}".lstrip(".")] = _copy(value)
    return attributes


def changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of the attributes that are another, have come or are gone."""
    missing = object()
    names = dict.fromkeys([*before, *after])
    return [
        name for name in names if not _same(before.get(name, missing), after.get(name, missing))
    ]


def _copy(value: Any, depth: int = 0) -> Any:
    if depth == _DEPTH:
        return value
    if isinstance(value, dict):
        return {key: _copy(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_copy(item, depth + 1) for item in value]
    return value.copy() if isinstance(value, set | np.ndarray) else value


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(
            _same(item, after[key]) for key, item in before.items()
        )
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        return np.array_equal(before, after)
    plain = (bool, int, float, complex, str, bytes, set)
    return type(before) is type(after) and isinstance(before, plain) and before == after
