"""What the core calls by name, and a plugin has: `declare_hook` in its declarations, `hook` in the core."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.plugins import load_plugins

HOOKS: dict[str, str] = {}


def declare_hook(name: str, code: str) -> None:
    """Add the function "MODULE:FUNCTION" that the core calls at `name`, which is "FOLDER.WHAT"."""
    HOOKS[name] = code


def hook(name: str, asked: str) -> Callable[..., Any]:
    """The function of a hook. WorkbenchError, which begins with what was asked for, where no plugin declares it."""
    load_plugins()
    if name not in HOOKS:
        folder = name.partition(".")[0]
        raise WorkbenchError(
            f"{asked}: this needs the folder workbench/lab/{folder}, which is missing: install the "
            "workbench again, or leave this out"
        )
    return code_of(HOOKS[name])


def code_of(code: str) -> Callable[..., Any]:
    """The function of "MODULE:FUNCTION"."""
    module, _, function = code.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]
