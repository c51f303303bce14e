"""`workbench recipes` and `workbench passes`: what there is, and all of one."""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.contracts import CONTRACTS, PassContract
from workbench.recipe.recipe import load_recipe, recipe_names

WIDTH = 100


def recipes(args: argparse.Namespace) -> int:
    """Print each recipe: about, model and mesh, passes; or one, as TOML."""
    if args.name is not None:
        print(load_recipe(args.name).to_toml(), end="")
        return 0
    for name in recipe_names():
        recipe = load_recipe(name)
        print(name)
        for said in (
            recipe.about,
            f"model   {recipe.subject}",
            f"passes  {', '.join(recipe.pass_names) or 'none'}",
        ):
            print(
                "\n".join(
                    textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent=" " * 10)
                )
            )
    return 0


def passes(args: argparse.Namespace) -> int:
    """Print each pass with its contract; of one also what it does to a graph, and its options."""
    if args.name is not None and args.name not in CONTRACTS:
        close = get_close_matches(args.name, CONTRACTS, 1)
        raise WorkbenchError(
            f"unknown pass {args.name!r}: "
            + (f"did you mean {close[0]!r}?" if close else "`workbench passes` lists them")
        )
    for contract in CONTRACTS.values() if args.name is None else [CONTRACTS[args.name]]:
        print("\n".join([contract.name, *(f"  {line}" for line in _contract(contract))]))
    if args.name is not None:
        contract = CONTRACTS[args.name]
        for text in (import_module(contract.home).__doc__, contract.options.__doc__):
            print(f"\n{inspect.cleandoc(text or '')}")
    return 0


def _contract(contract: PassContract) -> list[str]:
    tolerance = (
        f", norm-relative tolerance {contract.tolerance:g}"
        if contract.tolerance is not None
        else ""
    )
    facts: Mapping[str, str] = {
        "stage": str(contract.stage), "numerics": f"{contract.numerics}{tolerance}", "changes": contract.changes,
        **{rule: ", ".join(sorted(getattr(contract, rule))) for rule in ("requires", "conflicts", "after", "needs")},
        "bytes": "its collectives may move fewer" if contract.fewer_bytes else "",
        "repeats": "collectives of the graph" if contract.repeats else "",
        "options": ", ".join(f"{n}={_default(f)}" for n, f in contract.options.model_fields.items()),
        "source": contract.source,
    }
    lines = []
    for name, value in facts.items():
        if value:
            lines += textwrap.wrap(
                f"{name:<11}{value}", WIDTH - 2, subsequent_indent=" " * 11, break_on_hyphens=False
            )
    return lines


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "off"}[value]
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
