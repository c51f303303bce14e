"""The predicted peak of a step beside the peak that was recorded of it on GPUs.

    python benchmarks/peaks.py [FILE.jsonl ...] [--json benchmarks/results/peaks.json]

FILE.jsonl: results of benchmarks/step_time.py. Of each variant of ours the route is walked to its last graphs on a fake
world of the recorded size, without a GPU, and the peak is read off these graphs. A row that the result has already is
not made again.

`recording`: whether the recorded peak covers the recording of CUDA graphs, which the prediction is of. Older lines have
the peak of replayed steps only, which allocate nothing: what the recording took for a while is missing there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.result import tell
from benchmarks.variants import PEERS, recipe_of
from workbench.graph.read.peak import StepPeak
from workbench.pipeline.run import peak_by
from workbench.pipeline.stages import before_lowering
from workbench.recipe.recipe import Recipe
from workbench.torch_api.garbage import uncollected
from workbench.world.fake import fake_world
from workbench_lessons.course.recorded_figures import json_lines

RESULTS = Path(__file__).parent / "results"
FILES = ("llama3_1b_h200x4", "deepseek_v3_debug_h200x2", "memory_budget_h200x2", "llama3_8b_h200x2",
         "llama3_8b_8192_h200x2")


@uncollected()
def predicted(recipe: Recipe) -> StepPeak:
    """The peak of rank 0 of a fake world of the recipe's size, as on GPUs. Nothing is lowered: the graphs suffice."""
    with fake_world(recipe.mesh.world_size) as world:
        return peak_by(before_lowering(recipe, world).graphs, recipe.pass_names, gpu=True)


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The round with the highest peak of each variant of ours with these changes."""
    lines = sorted(json_lines(path), key=highest)
    own = {(line["variant"], json.dumps(line["changes"])): line for line in lines
           if line.get("peak_gib") and line["variant"] not in PEERS
           and not line["variant"].startswith("reference")}
    yield from own.values()


def highest(line: dict[str, Any]) -> float:
    """GiB of the recording of CUDA graphs, where the line has them, and of the timed steps: the larger one."""
    return max(line.get("peak_gib", 0.0), line.get("first_peak_gib", 0.0))


def row(path: Path, line: dict[str, Any]) -> dict[str, Any]:
    """One variant: what was recorded, what is predicted, and how far off that is; or why nothing is."""
    recipe = recipe_of(line["variant"], line["family"], line["changes"])
    covers = "cudagraph" not in recipe.pass_names or "first_peak_gib" in line
    measured = highest(line)
    found = {"file": path.name, "variant": line["variant"], "mesh": dict(recipe.mesh.axes), "changes": line["changes"],
             "recorded_gib": measured, "recording": covers}
    if "regional_inductor" in recipe.pass_names:
        return found | {"problem": "regional_inductor compiles its regions for the GPU"}
    peak = predicted(recipe)
    gib = peak.bytes / 2**30
    return found | {"phase": peak.phase, "predicted_gib": gib, "off": gib / measured - 1}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / f"{name}.jsonl" for name in FILES])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    wanted = [(path, line) for path in given.files for line in recorded(path)]
    rows = json.loads(given.json.read_text())["rows"] if given.json and given.json.exists() else []
    done = {(r["file"], r["variant"], json.dumps(r["changes"])) for r in rows}
    for path, line in wanted:
        if (path.name, line["variant"], json.dumps(line["changes"])) not in done:
            rows.append(row(path, line))
            tell("python benchmarks/peaks.py", {"rows": rows}, given.json)


if __name__ == "__main__":
    main()
