"""Which recipes run from both captures, and in what their graphs differ.

    python benchmarks/captures.py [RECIPE ...] [--json benchmarks/results/captures.json]

Each recipe is built and trained for 3 steps from both captures on gloo ranks, with at most 2 ranks an axis and 2
layers. A recipe that needs CUDA is built from both in a fake world, and its values stay unknown.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from result import tell

from workbench.errors import WorkbenchError
from workbench.pipeline.proofs.captures_proof import compare_captures
from workbench.pipeline.recipe_ranks import WorldChoice
from workbench.recipe.recipe import Recipe, load_recipe, recipe_names
from workbench.recipe.rules import cuda_reasons


def small(name: str) -> Recipe:
    """The recipe with at most 2 ranks an axis and 2 layers."""
    recipe = load_recipe(name)
    axes = {f"mesh.{axis}": 2 for axis in recipe.mesh.axes}
    return recipe.override({"model.n_layers": 2, **axes})


def row(name: str) -> dict[str, Any]:
    recipe = small(name)
    cuda = cuda_reasons(recipe.pass_names, recipe.model.attention)
    world: WorldChoice = "fake" if cuda else "gloo"
    found: dict[str, Any] = {"recipe": name, "mesh": dict(recipe.mesh.axes), "world": world,
                             "step": recipe.training.step}
    started = time.perf_counter()
    try:
        seen = compare_captures(recipe, world=world, progress=False, timeout=900.0)
    except WorkbenchError as error:  # of the recipe, before any capture
        return found | {"refused": dict.fromkeys(("joint", "traced"), str(error))}
    return found | {
        "refused": seen.refused, "aligned": seen.aligned, "verdicts": {k: str(v) for k, v in seen.verdicts.items()},
        "differences": [[d.kind, d.what, d.joint, d.traced, d.count] for d in seen.differences],
        "values": [str(seen.values.outcome), seen.values.message], "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=recipe_names())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.recipes:
        rows.append(row(name))
        print(json.dumps(rows[-1]), flush=True)
    tell("python benchmarks/captures.py", {"recipes": rows}, given.json)


if __name__ == "__main__":
    main()
