"""Steps of one layer on a GPU, node by node and replayed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from workbench.graph.read.replay import starts_work
from workbench.pipeline.build import build
from workbench.pipeline.train import Batches
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import current_world
from workbench.world.ranks import ranks
from workbench_lessons.course.lesson import Lesson
from workbench_lessons.course.recorded_figures import Figures, on_gpus


def steps_on_a_gpu(lesson: Lesson, recipes: Mapping[str, Recipe]) -> Figures:
    """Rows by model: node by node, replayed, and the recordings of the two graphs without anything around them.

    `step ms`: until the device is done. `CPU ms`: until the CPU has made its last call. Medians of 20 steps.
    """
    return on_gpus(lesson, "one step on one GPU", partial(measure, recipes))


def measure(recipes: Mapping[str, Recipe]) -> list[dict[str, Any]]:
    with ranks(1, backend="nccl", timeout=120, echo="none") as pool:
        found = [pool.run(_rows_of, model, recipe)[0] for model, recipe in recipes.items()]
    return [row for rows in found for row in rows]


def _rows_of(model: str, recipe: Recipe) -> list[dict[str, Any]]:
    made, module, step = _ready(recipe)
    rows = [{"model": model, "run": "node by node", **_timed(step, module), "step's MiB": _taken_mib(step, module),
             "pool MiB": 0, "operators": sum(map(starts_work, made.captured.graph.nodes))}]
    made, module, step = _ready(recipe.override({"passes": ["cudagraph"]}))
    [record] = made.records
    rows.append({"model": model, "run": "replayed", **_timed(step, module), "step's MiB": _taken_mib(step, module),
                 "pool MiB": round(record.after[-1].facts.pool_bytes / 2**20)})
    graphs = _timed(lambda: [body.replay_alone() for body in record.after], module)
    made.step.close()
    return [*rows, {"model": model, "run": "the two graphs alone", **graphs}]


def _ready(recipe: Recipe) -> tuple[Any, torch.nn.Module, Callable[[], None]]:
    made = build(recipe, current_world())
    given = Batches(made.authored).at(0)
    return made, made.authored.module, lambda: made.step(*given).backward()


def _timed(run: Callable[[], Any], module: torch.nn.Module) -> dict[str, float]:
    took = []
    for _ in range(23):
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began, launched - began))
    columns = zip(*took[3:], strict=True)
    return {name: round(1e3 * statistics.median(each), 2)
            for name, each in zip(("step ms", "CPU ms"), columns, strict=True)}


def _taken_mib(step: Callable[[], None], module: torch.nn.Module) -> int:
    module.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    return round((torch.cuda.max_memory_allocated() - held) / 2**20)
