"""A recipe without each pass, with neighbouring passes swapped and with other options, compared with itself.

    python benchmarks/ablate.py tour --vary passes.transformer_block_bucketing.separate_gather_group=false,true

Options are those of benchmarks/matrix.py; what follows `--` goes to each `workbench run`. A difference counts where it
is larger than half the ranges of both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.recipe.edits import parse_value
from workbench.recipe.recipe import Recipe, RecipeError, load_recipe

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.matrix import arguments, figures, noise, ran, run_in_turn, split, table


def variants(recipe: Recipe, vary: Sequence[tuple[str, list[Any]]] = ()) -> dict[str, Recipe | str]:
    """By name, the recipe first. A variant that breaks a rule for recipes is the rule's message.

    vary: keys as for `Recipe.override`, each with the values to try. A swap ignores the rules on order, since it shows
    what the order is for.
    """
    found: dict[str, Recipe | str] = {recipe.name: recipe}
    for where in ("joint_passes", "passes"):
        specs = getattr(recipe, where)
        listed = [spec.as_toml() for spec in specs]
        for i, spec in enumerate(specs):
            idle = [name for name in recipe.expect.no_effect if name != spec.name]
            found[f"without {spec.name}"] = _changed(
                recipe, {where: listed[:i] + listed[i + 1:], "expect.no_effect": idle})
        for i, (first, second) in enumerate(pairwise(specs)):
            swapped = [*listed[:i], listed[i + 1], listed[i], *listed[i + 2:]]
            found[f"{second.name} before {first.name}"] = _changed(
                recipe, {where: swapped, "free_order": True})
    for key, values in vary:
        for value in values:
            found[f"{key} = {value}"] = _changed(recipe, {key: value})
    return found


def _changed(recipe: Recipe, changes: dict[str, Any]) -> Recipe | str:
    try:
        return recipe.override({"strict": False, **changes})
    except RecipeError as error:
        return str(error)


def compared(steps: Sequence[float], base: Sequence[float]) -> str:
    """How much longer the median step takes than the base's, in ms."""
    if not steps or not base or steps is base:
        return ""
    apart = statistics.median(steps) - statistics.median(base)
    if min(len(steps), len(base)) == 1:
        return f"{apart:+,.1f} ms, noise unknown"
    return f"{apart:+,.1f} ms" if abs(apart) > noise(steps) + noise(base) else "within noise"


def main() -> int:
    ours, options = split(sys.argv[1:])
    parser = arguments(__doc__ or "", "out/ablate")
    parser.add_argument("recipe", metavar="RECIPE", help="a name, or a file")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=V1,V2",
                        help="try these values of a key of the recipe; may be repeated")
    asked = parser.parse_args(ours)
    pairs = [text.partition("=") for text in asked.vary]
    vary = [(key, [parse_value(word) for word in words.split(",")]) for key, _, words in pairs]
    folder = asked.out / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    refused: dict[str, list[Any]] = {}
    for number, (name, variant) in enumerate(variants(load_recipe(asked.recipe), vary).items()):
        if isinstance(variant, str):
            refused[name] = [variant]
            continue
        path = folder / f"{number:02}.toml"
        path.write_text(variant.to_toml(), encoding="utf-8")
        files[name] = str(path)
    found = run_in_turn(files, asked.out, asked.repeats, options)
    steps = {name: figures(ran(runs), "step ms") for name, runs in found.items()}
    base = next(iter(steps.values()))
    more = {name: compared(each, base) for name, each in steps.items()}
    print(table(found | refused, more))
    return 0 if base else 1


if __name__ == "__main__":
    sys.exit(main())
