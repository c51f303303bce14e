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
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workbench import WorkbenchError, build, load_recipe
from workbench.graph.read.simulated_run import StepTimeline, simulated
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.measured_run import measured
from workbench.pipeline.train import Batches
from workbench.world.mesh import current_world

WARMUP = 5


class Prediction(NamedTuple):
    """One collective, in milliseconds: the cost model's estimate, and the time that it took on the GPU."""

    part: str
    name: str
    lane: str
    label: str
    predicted_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Relative to the measured time: -0.2 for an estimate that is 20 % too short."""
        return self.predicted_ms / self.measured_ms - 1


def predictions(run: StepTimeline, graphs: dict[str, GraphModule], device: str = "h200") -> list[Prediction]:
    """The error of the cost model for each collective of a measured run that was matched with the graphs."""
    known = {(s.part, s.name): s for s in simulated(graphs, device).collectives}
    found = [Prediction(s.part, s.name, s.lane, s.label, known[s.part, s.name].ms, s.ms) for s in run.collectives
             if (s.part, s.name) in known]
    if known and not found:
        raise WorkbenchError("no collective of the profile fits the graphs: profile one forward and one backward of "
                             "this pair, and nothing else")
    return found


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
    matched, guess = predictions(run, graphs, options.device), simulated(graphs, options.device)
    if dist.get_rank() == 0:
        said = ["benchmarks/timelines.py", options.recipe, "--device", options.device, "--set", *options.set]
        rows = [{"part": p.part, "collective": p.name, "lane": p.lane, "label": p.label, "error": p.error,
                 "predicted_ms": p.predicted_ms, "measured_ms": p.measured_ms} for p in matched]
        errors = [abs(p.error) for p in matched]
        found = {
            "command": " ".join(said),
            "machine": machine(), "versions": versions(), "recipe": recipe.to_dict(),
            "measured": {"total_ms": run.total_ms, "compute_ms": run.compute_ms, "exposed_ms": run.exposed_ms},
            "simulated": {"total_ms": guess.total_ms, "compute_ms": guess.compute_ms, "exposed_ms": guess.exposed_ms},
            "collectives": len(guess.collectives), "matched": len(matched),
            "median_absolute_error": statistics.median(errors) if errors else None, "rows": rows,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(run, guess, f"matched {len(matched)} of {len(guess.collectives)}", sep="\n")
    built.step.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
