"""The plain attributes of a module and its parts: what its forward changes in Python, and a compiled step does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from workbench.torch_api.tree import tree_flatten, tree_map

Attributes = dict[str, Any]


def module_attributes(module: nn.Module) -> Attributes:
    """The attributes of all parts by name, such as "layers.0.count"; not of torch's own.

    Of lists, tuples, dictionaries and the like, their items as they are now; of sets and arrays, copies.
    """
    attributes = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                attributes[f"{path}.{name}".lstrip(".")] = tree_map(_copy, value)
    return attributes


def changed_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of the attributes that are another, have come or are gone."""
    missing = object()
    names = dict.fromkeys([*before, *after])
    return [
        name for name in names if not _same(before.get(name, missing), after.get(name, missing))
    ]


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, set | np.ndarray) else value


def _same(before: Any, after: Any) -> bool:
    (leaves, structure), (others, other_structure) = tree_flatten(before), tree_flatten(after)
    return structure == other_structure and all(map(_same_leaf, leaves, others))


def _same_leaf(before: Any, after: Any) -> bool:
    if before is after or type(before) is not type(after):
        return before is after
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after)
    return isinstance(before, (bool, int, float, complex, str, bytes, set)) and bool(before == after)
