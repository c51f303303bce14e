"""What a change costs: the seconds from a question to its difference, where the capture took its time.

    python benchmarks/what_if.py [--layers 32] [--json FILE]

The tour's recipe on a fake world of 8 (dp_shard 2 x tp 4), with overlap_collectives behind its passes. Several values
of an option where a change can start; wall and CPU seconds, since others may use the machine. All of a
difference counts: fingerprints, passes, level `light`, estimated memory, simulated timeline.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from result import tell

from workbench import Study, author, capture, fake_world, load_recipe, what_if

BUCKETING, OVERLAP = "passes.transformer_block_bucketing", "passes.overlap_collectives"


def asked(study: Study, changes: Mapping[str, Any]) -> dict[str, Any]:
    """One change: its seconds, and the stages that ran again."""
    gc.collect()  # what earlier variants left would be searched during the answer
    cpu = time.process_time()
    found = study.change(changes)
    return {"change": dict(changes), "seconds": found.seconds, "cpu_seconds": time.process_time() - cpu,
            "ran": found.ran, "outcome": str(found.after.outcome)}


def median(rows: Sequence[Mapping[str, Any]], what: str = "seconds") -> float:
    return statistics.median(row[what] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = load_recipe("tour").override({"model.n_layers": options.layers})
    layers = [f"layers.{i}" for i in range(options.layers)]
    plans = {f"{size} layers a bucket": [layers[i:i + size] for i in range(0, len(layers), size)]
             for size in (1, 2, 4, 8, len(layers))}
    rows: dict[str, list[dict[str, Any]]] = {}
    with fake_world(recipe.mesh.world_size) as world:
        started = time.perf_counter()
        capture(author(recipe, world)).close()
        whole = time.perf_counter() - started
        cpu = time.process_time()
        study = what_if(recipe, world)
        first = {"seconds": study.seconds, "cpu_seconds": time.process_time() - cpu,
                 "ran": study.ran}
        nodes = sum(len(graph.graph.nodes) for graph in study.pair.graphs)
        rows["transformer_block_bucketing last: buckets"] = [
            {**asked(study, {f"{BUCKETING}.buckets": plan}), "change": name} for name, plan in plans.items()]
        study.change({"passes": ["transformer_block_bucketing", "overlap_collectives"]})
        rows["overlap_collectives last: horizon"] = [asked(study, {f"{OVERLAP}.horizon": n}) for n in (2, 3, 4)]
        study.change({"passes": ["transformer_block_bucketing"]})
        cleaned = {"passes": ["transformer_block_bucketing", "graph_cleanup"]}
        rows["graph_cleanup last: put behind bucketing"] = [asked(study, cleaned)]
        never = {"joint_passes.reshard_after_forward.policy": "never"}
        rows["a tag: reshard_after_forward.policy"] = [asked(study, never)]
        started = time.perf_counter()
        study.revert()
        revert = time.perf_counter() - started
    result = {
        "layers": options.layers, "nodes": nodes,
        "whole_capture_seconds": whole, "first": first,
        "changes": rows, "revert_seconds": revert,
        "median_seconds": {name: median(each) for name, each in rows.items()},
        "median_cpu_seconds": {name: median(each, "cpu_seconds") for name, each in rows.items()},
    }
    tell(f"python benchmarks/what_if.py --layers {options.layers}", result, options.json)


if __name__ == "__main__":
    main()
