"""Kinds of capture and of training step: what a recipe's keys `capture` and `training.step` may name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.plugins import load_plugins

KINDS: dict[str, dict[str, str]] = {"capture": {"joint": "workbench.graph.capture:by_aot_autograd"},
                                    "training.step": {"pair": "workbench.pipeline.stages:PairStep"}}
"""For each key of a recipe whose values plugins may add: "MODULE:NAME" of the code by value."""
_HOMES = {"traced": "workbench.lab.traced_capture", "whole": "workbench.lab.whole_step"}


def declare_kind(key: str, name: str, code: str) -> None:
    """Add a value of a recipe's key. code: "MODULE:NAME", for "training.step" of a class derived from `PairStep`, for
    "capture" of a function `(authored, args, decompositions) -> JointGraph`.
    """
    KINDS[key][name] = code


def check_kind(key: str, name: str) -> str:
    """The name itself; ValueError where neither the core nor a plugin declares it."""
    if name not in KINDS[key]:
        load_plugins()
    if name not in KINDS[key]:
        missing = (
            f" (it comes with {_HOMES[name]}, which is not installed)" if name in _HOMES else ""
        )
        raise ValueError(
            f"unknown {name!r}{missing}: one of {', '.join(KINDS[key])}, or a plugin's"
        )
    return name


def find_kind(key: str, name: str) -> Any:
    """What was declared under this name, imported. Raises WorkbenchError for an unknown name."""
    try:
        module, _, attribute = KINDS[key][check_kind(key, name)].partition(":")
    except ValueError as error:
        raise WorkbenchError(f"{key}: {error}") from None
    return getattr(import_module(module), attribute)
