"""What a capture fixes: the numbers and names that the forward read from its modules, and which parameters are frozen.

Eager PyTorch reads them in each step. A compiled step holds their values, and refuses to run where one has changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.torch_api.tracing.side_effects import module_attribute

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_GONE = object()


class Fixed:
    """The values of a module's attributes, and its frozen parameters, as they are at the capture.

    read: the sources of what the forward read in Python. Modules that differ in numbers alone, as `layers.0` and
    `layers.1` do, count as one: alike blocks are not all captured.
    """

    def __init__(self, module: nn.Module, read: Iterable[str]):
        self.read = tuple(read)
        names = defaultdict[str, set[tuple[str, ...]]](set)
        for path, *chain in filter(None, map(module_attribute, self.read)):
            names[_alike(path)].add(tuple(chain))
        self._values = [(holder, chain[-1], holder[chain[-1]], path, ".".join(chain))
                        for path, part in module.named_modules() for chain in sorted(names.get(_alike(path), ()))
                        if type((holder := _holder(part, chain)).get(chain[-1], ...)) in _PLAIN]
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]

    def __len__(self) -> int:
        return len(self._values)

    def require_unchanged(self, title: str) -> None:
        """Raise WorkbenchError for the first value that is another now, or a parameter that is not frozen any more."""
        for holder, key, was, path, name in self._values:
            if (now := holder.get(key, _GONE)) is not was and now != was:
                where = f"module {path}: its" if path else "its module's"
                raise WorkbenchError(
                    f"the compiled step of {title}: {where} attribute {name!r} was {was!r} at the capture and is "
                    f"{'gone' if now is _GONE else repr(now)} now, which the compiled step would not read: capture "
                    "again, or make it a buffer and write into it in place")
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise WorkbenchError(
                    f"the compiled step of {title}: parameter {name} was frozen at the capture and requires a gradient "
                    "now, which the compiled step would not compute: capture again")


def _alike(path: str) -> str:
    return re.sub(r"\d+", "#", path)


def _holder(part: Any, chain: tuple[str, ...]) -> dict[str, Any]:
    """The `__dict__` in which the last name of the chain is looked up; empty where there is none."""
    for name in chain[:-1]:
        part = getattr(part, "__dict__", {}).get(name)
    return getattr(part, "__dict__", {})
