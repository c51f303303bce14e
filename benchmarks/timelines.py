"""A step's measured timeline beside the simulated one, and the cost model's error for each collective.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/timelines.py RECIPE --json FILE
        [--device h200] [--set KEY=VALUE ...]

Needs a GPU a rank. The step is forward and backward, after five warm-up steps; rank 0 writes its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workbench import build, load_recipe
from workbench.graph.read.simulated_run import simulated
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.measured_run import measured, predictions
from workbench.pipeline.train import Batches
from workbench.world.mesh import current_world

WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--set", nargs="*", default=[])
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    recipe = load_recipe(options.recipe).override(dict(item.split("=", 1) for item in options.set))
    built = build(recipe, current_world())
    batches = Batches(built.authored)

    def step() -> None:
        built.step(*batches.at(0)).backward()
        for parameter in built.authored.module.parameters():
            parameter.grad = None

    for _ in range(WARMUP):
        step()
    pair = built.step.pair
    run = measured(step, pair)
    graphs = pair.by_part
    told, guess = predictions(run, graphs, options.device), simulated(graphs, options.device)
    if dist.get_rank() == 0:
        said = ["benchmarks/timelines.py", options.recipe, "--device", options.device, "--set", *options.set]
        rows = [{"part": p.part, "collective": p.name, "lane": p.lane, "label": p.label, "error": p.error,
                 "predicted_ms": p.predicted_ms, "measured_ms": p.measured_ms} for p in told]
        errors = [abs(p.error) for p in told]
        found = {
            "command": " ".join(said),
            "machine": machine(), "versions": versions(), "recipe": recipe.to_dict(),
            "measured": {"total_ms": run.total_ms, "compute_ms": run.compute_ms, "exposed_ms": run.exposed_ms},
            "simulated": {"total_ms": guess.total_ms, "compute_ms": guess.compute_ms, "exposed_ms": guess.exposed_ms},
            "collectives": len(guess.collectives), "matched": len(told),
            "median_absolute_error": statistics.median(errors) if errors else None, "rows": rows,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(run, guess, f"matched {len(told)} of {len(guess.collectives)}", sep="\n")
    built.step.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
