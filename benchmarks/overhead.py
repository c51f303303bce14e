"""What proving costs: level `light` on top of the passes, and our capture over the bare torch calls.

    python benchmarks/overhead.py [--layers 32] [--repeats 3] [--json FILE]

Runs on a fake world of 8 (dp_shard 2 x tp 4) on one CPU core; captures are interleaved, medians are reported. Before
each timing the heap is collected and frozen: else a collection of what earlier captures left would count as proving.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from result import tell

from workbench import author, capture, fake_world, load_recipe, partition, run_joint, run_partitioned
from workbench.authoring.authored import Authored
from workbench.torch_api import aot


@contextlib.contextmanager
def quiet_heap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def bare_capture(authored: Authored) -> float:
    """Seconds of the two torch calls alone, under the settings they need."""
    args = authored.example_batch()
    with quiet_heap(), aot.Contexts() as stack:
        stack.enter_context(aot.capture_settings())
        started = time.perf_counter()
        aot.export_joint(stack, aot.dynamo_capture(stack, authored.module, args), args, None)
        return time.perf_counter() - started


def our_capture(authored: Authored) -> float:
    with quiet_heap():
        started = time.perf_counter()
        capture(authored).close()  # the two calls that `bare_capture` makes
        return time.perf_counter() - started


def proving(authored: Authored) -> dict[str, Any]:
    """Seconds of each pass and of what `light` adds to it: snapshots, lint, effect, collectives, memory."""
    recipe = authored.recipe
    assert recipe is not None
    joint = capture(authored)
    nodes = len(joint.graph.graph.nodes)
    with quiet_heap():
        started = time.perf_counter()
        records = run_joint(joint, recipe.joint_passes)
        total = time.perf_counter() - started
    pair = partition(joint)
    with quiet_heap():
        started = time.perf_counter()
        later, _ = run_partitioned(pair, recipe.passes)
        total += time.perf_counter() - started
    joint.close()
    records += later
    passes = sum(r.seconds for r in records)
    rows = [{"pass": r.name, "seconds": r.seconds, "verify_seconds": r.verify_seconds} for r in records]
    return {"nodes": nodes, "passes_seconds": passes, "light_seconds": total - passes, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = load_recipe("tour").override({"model.n_layers": options.layers})
    bare, ours = [], []
    with fake_world(recipe.mesh.world_size) as world:
        authored = author(recipe, world)
        bare_capture(authored)  # warm-up: imports and caches
        for _ in range(options.repeats):
            bare.append(bare_capture(authored))
            ours.append(our_capture(authored))
        runs = [proving(authored) for _ in range(options.repeats)]
    result = {
        "layers": options.layers,
        "capture": {"bare_seconds": bare, "ours_seconds": ours,
                    "overhead": statistics.median(ours) / statistics.median(bare) - 1},
        "light": {"runs": runs, "overhead": statistics.median(r["light_seconds"] / r["passes_seconds"] for r in runs),
                  "worst_pass_seconds": max(row["verify_seconds"] for r in runs for row in r["rows"])},
    }
    tell(f"python benchmarks/overhead.py --layers {options.layers} --repeats {options.repeats}", result, options.json)


if __name__ == "__main__":
    main()
