"""Steps that are compiled and replayed on two GPUs, beside what the simulation says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.graph.read.simulated_run import simulated
from workbench.lab.what_if.study import what_if
from workbench.pipeline.run import run
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import World
from workbench.world.ranks import ranks
from workbench_lessons.course.lesson import Lesson
from workbench_lessons.course.recorded_figures import Figures, on_gpus

six_layers = {
    "model.n_layers": 6, "data.batch_per_rank": 4, "data.seq_len": 1024, "joint_passes": ["inductor_decomposition"],
    "training.steps": 20, "training.deterministic": False,
}
Lists = Mapping[str, Sequence[Any]]


def steps(lesson: Lesson, recipe: Recipe, lists: Lists, world: World) -> Figures:
    """Training steps on two GPUs, AdamW included, by list of passes; the simulation has no optimizer."""
    figures = on_gpus(lesson, "replayed", partial(measure, recipe, lists), gpus=2)
    study = what_if(recipe, world, device="h200x2")
    rows = []
    for row in figures.rows:
        study.change(passes=lists[row["passes"]])
        timeline = simulated(study.pair.by_part, "h200x2", fused=True)
        rows.append({**row, "exposed, simulated": round(timeline.exposed_ms, 1)})
    return replace(figures, name="training steps on two GPUs", rows=tuple(rows))


def measure(recipe: Recipe, lists: Lists) -> list[dict[str, Any]]:
    """Two runs of each list, one list after another: a compiled step that is replayed."""
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in lists}
    with ranks(2, backend="nccl", echo="none", timeout=600) as pool:
        for _ in range(2):
            for name, passes in lists.items():
                compiled = recipe.override({"passes": [*passes, "full_inductor_compilation", "cudagraph"]})
                runs[name].append(pool.run(_on_a_rank, compiled)[0])
    return [{"passes": name, "step ms": first[0], "second run": second[0], "exposed ms": first[1]}
            for name, (first, second) in runs.items()]


def _on_a_rank(recipe: Recipe) -> tuple[float, float]:
    report = run(recipe, progress=False)
    assert report.profile is not None and report.step_seconds is not None
    return round(1e3 * report.step_seconds, 1), round(report.profile.exposed_nccl_ms, 1)
