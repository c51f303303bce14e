"""What a capture and a partition cost by depth.

    python benchmarks/depth.py [--layers 4 32] [--repeats 3] [--json FILE]

Runs llama3 of 128 channels on a fake world of 512 (dp_replicate 16 x dp_shard 8 x tp 4), where sizes cost no time. The
depths take turns, and medians are reported; seconds are wall time, and beside them the process's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from overhead import quiet_heap
from result import tell

from workbench import author, capture, fake_world, partition
from workbench.authoring.authored import Authored
from workbench.recipe.recipe import Recipe

MESH = {"dp_replicate": 16, "dp_shard": 8, "tp": 4}


def timed(authored: Authored) -> dict[str, Any]:
    """Seconds of a capture and of the partition after it."""
    found: dict[str, Any] = {}
    with quiet_heap():
        laps = [(time.perf_counter(), time.process_time())]
        joint = capture(authored)
        laps.append((time.perf_counter(), time.process_time()))
        nodes = len(joint.graph.graph.nodes)
        partition(joint)
        laps.append((time.perf_counter(), time.process_time()))
    for name, before, after in zip(("capture", "partition"), laps, laps[1:], strict=False):
        found |= {f"{name}_seconds": after[0] - before[0], f"{name}_cpu_seconds": after[1] - before[1]}
    return found | {"nodes": nodes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = Recipe(name="depth", mesh=MESH, data={"seq_len": 16})  # type: ignore[arg-type]
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in options.layers}
    with fake_world(recipe.mesh.world_size) as world:
        models = {layers: author(recipe.override({"model.n_layers": layers}), world) for layers in options.layers}
        partition(capture(author(recipe.override({"model.n_layers": 1}), world)))  # warm-up: imports and caches
        for _ in range(options.repeats):
            for layers, authored in models.items():
                runs[layers].append(timed(authored))
    rows = []
    for layers, each in runs.items():
        row = {"layers": layers, "nodes": each[0]["nodes"]}
        rows.append(row | {k: statistics.median(r[k] for r in each) for k in each[0] if k.endswith("seconds")})
    sizes = " ".join(map(str, options.layers))
    tell(f"python benchmarks/depth.py --layers {sizes} --repeats {options.repeats}",
         {"mesh": MESH, "rows": rows, "runs": runs}, options.json)


if __name__ == "__main__":
    main()
