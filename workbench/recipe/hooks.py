"""What the core calls by name, and a plugin may have. A value of `capture` or `training.step` is a hook "KEY.VALUE"."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.plugins import load_plugins

HOOKS = {"check.agreement": "workbench.checks.agreement:agree_on_collectives",
         "check.order": "workbench.checks.order:chosen_by",
         "capture.joint": "workbench.graph.capture:by_aot_autograd",
         "level.full": "workbench.pipeline.proofs.numerics_proof:prove_numerics",
         "training.step.pair": "workbench.pipeline.stages:PairStep"}


def declare_hook(name: str, code: str) -> None:
    """Add the function or class "MODULE:NAME" that the core calls at `name`: "FOLDER.WHAT" or "KEY.VALUE"."""
    HOOKS[name] = code


def hook(name: str, asked: str) -> Any:
    """The code of a hook. WorkbenchError, which begins with what was asked for, where no plugin declares it."""
    load_plugins()
    if name not in HOOKS:
        folder = name.partition(".")[0]
        raise WorkbenchError(f"{asked}: this needs the plugin {folder!r}, which is missing: "
                             "install the workbench again, or leave this out")
    return resolve_name(HOOKS[name])


def values_of(key: str) -> list[str]:
    """The values that a recipe's key may have."""
    load_plugins()
    return [name.removeprefix(f"{key}.") for name in HOOKS if name.startswith(f"{key}.")]


def check_value(key: str, value: str) -> str:
    """The value itself; ValueError where neither the core nor a plugin declares it."""
    if value not in (known := values_of(key)):
        raise ValueError(f"unknown {value!r}: one of {', '.join(known)}, or of a plugin that is not installed")
    return value


def hook_of(key: str, value: str) -> Any:
    """The code of a recipe's value. WorkbenchError for one that nobody declares."""
    try:
        return resolve_name(HOOKS[f"{key}.{check_value(key, value)}"])
    except ValueError as error:
        raise WorkbenchError(f"{key}: {error}") from None
