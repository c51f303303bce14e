"""Public names of a package that load on first use, so that its import is fast and needs no torch."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from typing import Any

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def exported(package: str) -> Exports:
    """The `__all__`, `__getattr__` and `__dir__` of a package.

    The names are those that its source imports under `if TYPE_CHECKING`: one list, for type checkers too.
    """
    blocks = [node for node in ast.parse(inspect.getsource(sys.modules[package])).body
              if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    homes = {alias.name: node.module or "" for block in blocks for node in block.body
             if isinstance(node, ast.ImportFrom) for alias in node.names}
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no name {name!r}")
        return getattr(__import__(homes[name], fromlist=[name]), name)

    return names, get, lambda: names
