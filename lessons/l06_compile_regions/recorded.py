"""Steps with compiled regions: measured where there are GPUs, and of committed runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workbench import load_recipe, run
from workbench.notebook.draw.picture import Table, table
from workbench.tools.compatibility import results_dir

RECIPES = {
    "llama3": ("ordinary", "none"),
    "llama3_block_bucketing": ("ordinary", "buckets"),
    "llama3_flex": ("FlexAttention", "none"),
    "llama3_flex_block_bucketing_regional": ("FlexAttention, compiled", "buckets"),
    "llama3_block_bucketing_cudagraph": ("ordinary", "buckets, CUDA graph"),
    "llama3_flex_block_bucketing_regional_cudagraph": ("FlexAttention, compiled", "buckets, CUDA graph"),
}


def flex_step(title: str, *passes: Mapping[str, Any]) -> dict[str, Any]:
    """A step of a small llama3 with FlexAttention on one GPU: how many compiled functions, and milliseconds."""
    alone = {"mesh.dp_shard": 1, "mesh.tp": 1, "model.n_layers": 2, "data.seq_len": 1024, "training.steps": 10}
    report = run(load_recipe("llama3_flex").override({**alone, "passes": list(passes)}), world="nccl", progress=False)
    effects = [row.verdict("effect") for row in report.passes]
    parts = sum(sum(effect.evidence.get("regions", [])) for effect in effects if effect is not None)
    return {"FlexAttention": title, "compiled functions": parts, "a step, ms": round(1000 * report.step_seconds, 1)}


def feed_forward_step(title: str, *passes: str) -> dict[str, Any]:
    """A step of a small llama3 on two GPUs: kernels, milliseconds, and the verdict of numerics."""
    two_gpus = {"mesh.dp_shard": 2, "mesh.tp": 1, "model.n_layers": 2, "passes": list(passes)}
    report = run(load_recipe("llama3").override(two_gpus), world="nccl", level="full", progress=False)
    numerics = next(verdict for verdict in report.pipeline if verdict.check == "numerics")
    assert report.profile is not None
    return {"compiled": title, "kernels": report.profile.kernels, "a step, ms": round(1e3 * report.step_seconds, 1),
            "numerics": str(numerics.outcome)}


def _attention(run_of: Mapping[str, Any]) -> float:
    return sum(ms for kernel, ms in run_of["longest"].items() if "attention" in kernel or "sdpa" in kernel)


def attention_table() -> Table:
    """Recorded steps of a llama3 1b on four GPUs, by attention and passes."""
    with (results_dir() / "llama3_1b_h200x4.jsonl").open(encoding="utf-8") as lines:
        runs: Sequence[Mapping[str, Any]] = [json.loads(line) for line in lines]
    rows = []
    for name, which in RECIPES.items():
        mine = [run_of for run_of in runs if run_of["variant"] == name]
        steps = ", ".join(f"{run_of['step_ms']:.1f}" for run_of in mine)
        kernels = ", ".join(f"{_attention(run_of):.1f}" for run_of in mine)
        attention = kernels if any(map(_attention, mine)) else "not counted"  # many kernels with other names
        rows.append((*which, steps, attention))
    columns = ("attention", "passes", "a step of each run, ms", "attention kernels, ms")
    note = f"medians of {len(runs[0]['steps_ms'])} steps on 4 H200, torch {runs[0]['versions']['torch']}"
    return table("a llama3 of a billion parameters", columns, rows, note)
