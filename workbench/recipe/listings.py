"""`workbench recipes` and `workbench passes`: what there is, without importing torch."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any

from workbench.recipe.contracts import CONTRACTS, PassContract
from workbench.recipe.recipe import load_recipe, recipe_names

WIDTH = 100


def recipes(_: argparse.Namespace) -> int:
    """Print each recipe: about, model and mesh, passes."""
    for name in recipe_names():
        recipe = load_recipe(name)
        print(name)
        for said in (recipe.about, f"model   {recipe.subject}", f"passes  {', '.join(recipe.pass_names) or 'none'}"):
            print("\n".join(textwrap.wrap(said, WIDTH, initial_indent="  ", subsequent_indent=" " * 10)))
    return 0


def passes(_: argparse.Namespace) -> int:
    """Print each pass with its contract."""
    for contract in CONTRACTS.values():
        print("\n".join([contract.name, *(f"  {line}" for line in _contract(contract))]))
    return 0


def _contract(contract: PassContract) -> list[str]:
    tolerance = f", norm-relative tolerance {contract.tolerance:g}" if contract.tolerance is not None else ""
    facts: Mapping[str, str] = {
        "stage": str(contract.stage), "numerics": f"{contract.numerics}{tolerance}", "changes": contract.changes,
        **{rule: ", ".join(sorted(getattr(contract, rule))) for rule in ("requires", "conflicts", "after", "needs")},
        "bytes": "its collectives may move fewer" if contract.fewer_bytes else "",
        "options": ", ".join(f"{n}={_default(f)}" for n, f in contract.options.model_fields.items()),
        "source": contract.source,
    }
    lines = []
    for name, value in facts.items():
        if value:
            lines += textwrap.wrap(f"{name:<11}{value}", WIDTH - 2, subsequent_indent=" " * 11, break_on_hyphens=False)
    return lines


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "off"}[value]
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
