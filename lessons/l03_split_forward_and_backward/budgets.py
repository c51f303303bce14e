"""Memory budgets as they ran on GPUs, beside the peaks that were predicted of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import mean

from workbench.notebook.draw.picture import Table, table
from workbench.recipe.files import json_lines
from workbench.tools.compatibility import results_dir

MEASURED = "memory_budget_h200x2.jsonl"
RESHARD, FULL = "_reshard", "full_checkpointing"


@dataclass(frozen=True)
class Budget:
    """A measured step. gib: saved for the backward. longer: milliseconds beyond the step without a budget. regathers:
    whether the backward gathers the weights again, as full checkpointing does. rounds: the median step of each round,
    in milliseconds. predicted, peak: GiB; the peak includes the recording of CUDA graphs.
    """

    name: str
    gib: float
    longer: float
    regathers: bool
    rounds: tuple[float, ...]
    predicted: float
    peak: float


def measured_budgets() -> list[Budget]:
    """The steps that were measured: without a budget first, then by the bytes saved."""
    lines = json_lines(results_dir() / MEASURED)
    rows = json.loads((results_dir() / "peaks.json").read_text(encoding="utf-8"))["rows"]
    peaks = {row["variant"]: row for row in rows if row["file"] == MEASURED}
    rounds: dict[str, list[float]] = {}
    for line in lines:
        rounds.setdefault(line["variant"], []).append(line["step_ms"])
    first = lines[0]["variant"]
    saved = {line["variant"]: line["saved_gib"] for line in lines}
    steps = [Budget(_name(variant, variant == first), saved[variant], mean(times) - mean(rounds[first]),
                    variant.endswith((RESHARD, FULL)), tuple(times), peaks[variant]["predicted_gib"],
                    peaks[variant]["recorded_gib"])
             for variant, times in rounds.items()]
    return sorted(steps, key=lambda step: -step.gib)


def _name(variant: str, first: bool) -> str:
    gib = variant.removesuffix(RESHARD).rpartition("_budget_")[2]
    if first:
        return "no budget"
    return f"{gib} GiB" if gib != variant else "full checkpointing"


def budget_table() -> Table:
    """The measured steps: what they saved, their peak as predicted and as recorded, and their time."""
    line = json_lines(results_dir() / MEASURED)[0]
    machine, torch = line["machine"]["gpus"], line["versions"]["torch"]
    rows = [(step.name, "gathered again" if step.regathers else "kept", f"{step.gib:.1f}",
             f"{step.predicted:.1f}", f"{step.peak:.1f}", ", ".join(f"{ms:.1f}" for ms in step.rounds),
             f"{step.longer:.1f}") for step in measured_budgets()]
    columns = ("budget", "weights", "GiB saved", "predicted peak GiB", "peak GiB", "step ms, each round",
               "ms longer")
    return table("budgets, measured", columns, rows,
                 "what is saved was chosen by another solver, which this workbench had before",
                 f"each round is the median of {len(line['steps_ms'])} steps; ms longer compares means of the rounds",
                 f"recorded on {len(machine)} {machine[0]}, torch {torch}")
