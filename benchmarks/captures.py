"""Which recipes run from both captures, and in what their graphs differ.

    python benchmarks/captures.py [RECIPE ...] [--json benchmarks/results/captures.json]
    python benchmarks/captures.py --gpus [RECIPE ...] [--together 3] [--json FILE]       # on two GPUs

Each recipe is built and trained for 3 steps from both captures on gloo ranks, with at most 2 ranks an axis and 2
layers. A recipe that needs CUDA is built from both in a fake world, and its values stay unknown.

On GPUs, ON_GPUS and each recipe that needs CUDA are trained for 8 steps, each in processes of its own, which end after
LIMIT seconds. step_ms are the medians of the last 4. `--together`: so many at once, whose steps are not timed. The file
is written after each recipe, and a recipe that it holds already is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from result import tell

from workbench.errors import WorkbenchError
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.recipe_ranks import WorldChoice
from workbench.recipe.recipe import Recipe, load_recipe, recipe_names
from workbench.recipe.rules import cuda_reasons
from workbench.world.ranks import RankError
from workbench_lessons.l17_two_captures.compare import compare_captures

PLAIN, INDUCTOR = "llama3_block_bucketing", "llama3_full_inductor_block_bucketing"
TWO: dict[str, Any] = {"mesh.dp_shard": 2, "mesh.tp": 1}
OF_1B = {**TWO, "model.flavor": "1b", "data.seq_len": 2048, "data.batch_per_rank": 4, "precision.param": "bfloat16"}
ON_GPUS: list[tuple[str, dict[str, Any]]] = [(PLAIN, TWO), (PLAIN, OF_1B), (INDUCTOR, TWO)]
LIMIT = 300.0


def on_gpus(names: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Recipes and their changes: ON_GPUS, and those that need CUDA; of these, the named ones."""
    recipes = [load_recipe(name) for name in recipe_names()]
    cuda = [r.name for r in recipes if cuda_reasons(r.pass_names, r.model.attention)]
    return [each for each in [*ON_GPUS, *((name, TWO) for name in cuda)] if not names or each[0] in names]


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
    except RankError:  # a failed rank is a failure, no refusal
        raise
    except WorkbenchError as error:  # of the recipe, before any capture
        return found | {"refused": dict.fromkeys(("joint", "traced"), str(error))}
    if changes is not None:
        found |= {"flavor": recipe.model.flavor, "step_ms": {
            name: statistics.median(seconds[-4:]) * 1e3 for name, seconds in seen.step_seconds.items()}}
    return found | {
        "refused": seen.refused, "aligned": seen.aligned, "verdicts": {k: str(v) for k, v in seen.verdicts.items()},
        "differences": [[d.kind, d.what, d.joint, d.traced, d.count] for d in seen.differences],
        "values": [str(seen.values.outcome), seen.values.message], "seconds": round(time.perf_counter() - started, 1)}


def apart(name: str, changes: dict[str, Any], timed: bool) -> dict[str, Any]:
    """`row` on GPUs in a process of its own; a `problem` where it fails or takes too long."""
    found: dict[str, Any] = {"recipe": name, "mesh": dict(load_recipe(name).override(changes).mesh.axes),
                             "flavor": changes.get("model.flavor", "debug"), "world": "nccl"}
    started = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps([name, changes])], capture_output=True,
                              text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return found | {"problem": f"not done in {LIMIT:g} s"}
    if done.returncode:
        return found | {"problem": done.stderr[-3000:]}
    found |= json.loads(done.stdout.splitlines()[-1])
    if not timed:
        found.pop("step_ms", None)
    return found | {"command": round(time.perf_counter() - started, 1)}


def run_on_gpus(names: list[str], together: int, target: Path | None) -> None:
    """Each recipe that `target` does not hold, written there at once."""
    found: dict[str, Any] = {"command": "python benchmarks/captures.py --gpus", "machine": machine(),
                             "versions": versions(), "recipes": []}
    if target is not None and target.exists():
        held = json.loads(target.read_text())
        if (held["machine"], held["versions"]) != (found["machine"], found["versions"]):
            sys.exit(f"{target} is of another machine or other versions: give another file")
        found["recipes"] = [row for row in held["recipes"] if "problem" not in row and (
            together > 1 or "step_ms" in row or row["refused"])]
    done = [(row["recipe"], row["flavor"]) for row in found["recipes"]]
    todo = [each for each in on_gpus(names) if (each[0], each[1].get("model.flavor", "debug")) not in done]
    with ThreadPoolExecutor(together) as pool:
        for one in as_completed(pool.submit(apart, *each, together == 1) for each in todo):
            found["recipes"].append(one.result())
            print(json.dumps(found["recipes"][-1]), flush=True)
            if target is not None:
                target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)  # in a process of its own
    given = parser.parse_args()
    if given.one:
        print(json.dumps(row(*given.one)), flush=True)
        return
    if given.gpus:
        run_on_gpus(given.recipes, given.together, given.json)
        return
    rows = []
    for name in given.recipes or recipe_names():
        rows.append(row(name))
        print(json.dumps(rows[-1]), flush=True)
    tell("python benchmarks/captures.py", {"recipes": rows}, given.json)


if __name__ == "__main__":
    main()
