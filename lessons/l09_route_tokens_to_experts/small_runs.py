"""The small model that "Route tokens to experts" trains, and what steps on GPUs took."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch

from workbench.authoring.author import author
from workbench.notebook.draw.picture import Table
from workbench.pipeline.train import Training, train
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.tools.compatibility import results_dir
from workbench.world.mesh import World
from workbench_lessons.course.recorded_figures import json_lines

RECORDED = "deepseek_v3_debug_h200x2"
VARIANTS = {
    "eager": "eager FSDP2 + EP",
    "deepseek_v3": "dropless",
    "deepseek_v3_block_bucketing": "dropless, buckets",
    "deepseek_v3_capacity_cudagraph": "slots, CUDA graph",
    "deepseek_v3_capacity_block_bucketing_cudagraph": "slots, CUDA graph, buckets",
    "deepseek_v3_capacity_full_inductor_cudagraph": "slots, CUDA graph, Inductor",
}


@cache
def _text() -> tempfile.TemporaryDirectory[str]:
    """A folder with the numbers from 0 to 19,999 as text: the same on every machine."""
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "numbers.txt").write_text(" ".join(map(str, range(20_000))))
    return folder


def one_layer() -> Recipe:
    """A DeepSeek v3 of one layer on one rank: 8 experts, two for each of 512 tokens, and slots.

    No groups of experts, no balance. The arithmetic is float64, so that every machine counts the same copies.
    """
    return load_recipe("deepseek_v3").override({
        "model.n_layers": 1, "model.n_dense_layers": 0, "model.n_experts": 8, "model.top_k": 2,
        "model.n_groups": 1, "model.top_groups": 1, "model.dispatch": "capacity", "model.balance_rate": 0.0,
        "mesh.dp_shard": 1, "mesh.tp": 1, "mesh.ep": 1, "data.path": _text().name, "data.batch_per_rank": 8,
        "precision.param": "float64", "precision.reduce": "float64", "training.lr": 2e-4})


def trained(recipe: Recipe) -> Training:
    """Train eagerly in this process."""
    return train(author(recipe, World("gloo", 1, 0, torch.device("cpu"))))


def recorded_steps() -> Table:
    """The steps of each variant on two GPUs: every recorded run, kernels, launches and dropped copies."""
    runs = list(json_lines(results_dir() / f"{RECORDED}.jsonl"))
    rows = []
    for variant, title in VARIANTS.items():
        of_variant = [run for run in runs if run["variant"] == variant]
        steps = ", ".join(f"{run['step_ms']:.0f}" for run in of_variant)
        kernels = ", ".join(f"{run['kernels_ms']:.0f}" for run in of_variant)
        rows.append((title, steps, kernels, f"{of_variant[0]['launches']:,}", f"{of_variant[0]['dropped']:.0%}"))
    columns = "step", "each run, ms", "compute kernels, ms", "launches", "copies dropped"
    return Table("a small DeepSeek v3 on two H200, 8,192 tokens a rank", columns, tuple(rows))
