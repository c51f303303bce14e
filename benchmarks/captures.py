"""Which recipes run from both captures, and in what their graphs differ.

    python benchmarks/captures.py [RECIPE ...] [--json benchmarks/results/captures.json]
    python benchmarks/captures.py --gpus [--json FILE]    # on two GPUs, with the times of the steps

Each recipe is built and trained for 3 steps from both captures on gloo ranks, with at most 2 ranks an axis and 2
layers. A recipe that needs CUDA is built from both in a fake world, and its values stay unknown. On GPUs, ON_GPUS are
trained for 8 steps; step_ms are the medians of the last 4.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from result import tell

from workbench.errors import WorkbenchError
from workbench.pipeline.proofs.captures_proof import compare_captures
from workbench.pipeline.recipe_ranks import WorldChoice
from workbench.recipe.recipe import Recipe, load_recipe, recipe_names
from workbench.recipe.rules import cuda_reasons

PLAIN, INDUCTOR = "llama3_block_bucketing", "llama3_full_inductor_block_bucketing"
TWO: dict[str, Any] = {"mesh.dp_shard": 2, "mesh.tp": 1}
OF_1B = {**TWO, "model.flavor": "1b", "data.seq_len": 2048, "data.batch_per_rank": 4, "precision.param": "bfloat16"}
ON_GPUS: list[tuple[str, dict[str, Any]]] = [(PLAIN, TWO), (PLAIN, OF_1B), (INDUCTOR, TWO)]


def small(name: str) -> Recipe:
    """The recipe with at most 2 ranks an axis and 2 layers."""
    recipe = load_recipe(name)
    axes = {f"mesh.{axis}": 2 for axis in recipe.mesh.axes}
    return recipe.override({"model.n_layers": 2, **axes})


def row(name: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """One recipe as `small` makes it, or with these changes on GPUs."""
    recipe = small(name) if changes is None else load_recipe(name).override(changes)
    cuda = cuda_reasons(recipe.pass_names, recipe.model.attention)
    world: WorldChoice = "nccl" if changes is not None else "fake" if cuda else "gloo"
    found: dict[str, Any] = {"recipe": name, "mesh": dict(recipe.mesh.axes), "world": world,
                             "step": recipe.training.step}
    started = time.perf_counter()
    try:
        seen = compare_captures(recipe, world=world, progress=False, timeout=900.0,
                                steps=3 if changes is None else 8)
    except WorkbenchError as error:  # of the recipe, before any capture
        return found | {"refused": dict.fromkeys(("joint", "traced"), str(error))}
    if changes is not None:
        found |= {"flavor": recipe.model.flavor, "step_ms": {
            name: statistics.median(seconds[-4:]) * 1e3 for name, seconds in seen.step_seconds.items()}}
    return found | {
        "refused": seen.refused, "aligned": seen.aligned, "verdicts": {k: str(v) for k, v in seen.verdicts.items()},
        "differences": [[d.kind, d.what, d.joint, d.traced, d.count] for d in seen.differences],
        "values": [str(seen.values.outcome), seen.values.message], "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=recipe_names())
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, listed = [], ON_GPUS if given.gpus else [(name, None) for name in given.recipes]
    for name, changes in listed:
        rows.append(row(name, changes))
        print(json.dumps(rows[-1]), flush=True)
        if given.json is not None and given.gpus:
            given.json.write_text(json.dumps(rows))  # in case it is cut off
    tell("python benchmarks/captures.py" + " --gpus" * given.gpus, {"recipes": rows}, given.json)


if __name__ == "__main__":
    main()
