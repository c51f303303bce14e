"""Public names of a package of declarations, which are imported when they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: `__getattr__ = on_use(__name__, {"read_order": ".order"})`.

    modules: by name, the module that defines it. One in the package has another name than what it defines.
    """
    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no name {name!r}")
        return getattr(import_module(modules[name], package), name)

    return load
