"""What a capture, a partition and bucketing cost by depth.

    python benchmarks/depth.py [--layers 4 32] [--repeats 3] [--json FILE]

Runs llama3 of 128 channels on a fake world of 512 (dp_replicate 16 x dp_shard 8 x tp 4), where sizes cost no time. The
depths take turns, and medians are reported, in seconds of the process. `gauge_cpu_seconds` is torch's own capture of 4
layers: how fast this machine is. tests/pipeline/test_depth.py compares with results/depth_gauged.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from overhead import bare_capture, quiet_heap
from result import tell

from workbench import author, capture, fake_world, partition, run_partitioned
from workbench.authoring.authored import Authored
from workbench.recipe.recipe import Recipe

MESH = {"dp_replicate": 16, "dp_shard": 8, "tp": 4}
STAGES = ("capture_cpu_seconds", "partition_cpu_seconds", "bucketing_cpu_seconds")
GAUGE_LAYERS = 4


def timed(authored: Authored) -> dict[str, Any]:
    """Seconds of a capture, of the partition after it, and of bucketing its forward and backward."""
    with quiet_heap():
        laps = [time.process_time()]
        joint = capture(authored)
        laps.append(time.process_time())
        nodes = len(joint.graph.graph.nodes)
        pair = partition(joint)
        laps.append(time.process_time())
        run_partitioned(pair, ["transformer_block_bucketing"])
        laps.append(time.process_time())
    seconds = [after - before for before, after in pairwise(laps)]
    return {"nodes": nodes, **dict(zip(STAGES, seconds, strict=True))}


def gauged(authored: Authored) -> float:
    began = time.process_time()
    bare_capture(authored)
    return time.process_time() - began


def measure(depths: list[int], repeats: int) -> dict[str, Any]:
    """A row for each depth, and the gauge: medians of the repeats."""
    recipe = Recipe(name="depth", mesh=MESH, data={"seq_len": 16})  # type: ignore[arg-type]
    runs: dict[int, list[dict[str, Any]]] = {layers: [] for layers in depths}
    with fake_world(recipe.mesh.world_size) as world:
        models = {layers: author(recipe.override({"model.n_layers": layers}), world) for layers in depths}
        small = author(recipe.override({"model.n_layers": GAUGE_LAYERS}), world)
        bare_capture(small)
        timed(small)  # imports and caches
        gauge = []
        for _ in range(repeats):
            gauge.append(gauged(small))
            for layers, authored in models.items():
                runs[layers].append(timed(authored))
    rows = []
    for layers, each in runs.items():
        medians = {stage: statistics.median(run[stage] for run in each) for stage in STAGES}
        rows.append({"layers": layers, "nodes": each[0]["nodes"], **medians})
    return {"mesh": MESH, "gauge_cpu_seconds": statistics.median(gauge), "rows": rows}


def slower(now: dict[str, Any], before: dict[str, Any], factor: float = 1.5) -> list[str]:
    """The stages that take more than `factor` times what they took before, in units of the gauge, at each depth."""
    found = []
    rows = {row["layers"]: row for row in before["rows"]}
    for row in now["rows"]:
        for stage in STAGES:
            of_now = row[stage] / now["gauge_cpu_seconds"]
            of_before = rows[row["layers"]][stage] / before["gauge_cpu_seconds"]
            if of_now > factor * of_before:
                found.append(f"{stage} at {row['layers']} layers: {of_now:.2f} gauges, {of_before:.2f} before")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = " ".join(map(str, options.layers))
    tell(f"python benchmarks/depth.py --layers {sizes} --repeats {options.repeats}",
         measure(options.layers, options.repeats), options.json)


if __name__ == "__main__":
    main()
