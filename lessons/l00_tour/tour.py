"""What "The tour" shows and asks: tables of its step and of recorded steps, and the graders of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import torch
from torch.nn import functional as F

from workbench.errors import WorkbenchError
from workbench.lab.what_if.study import Study
from workbench.notebook.draw.picture import Table
from workbench.pipeline.report import Report
from workbench.recipe.recipe import Recipe
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.recorded_figures import json_lines
from workbench_lessons.l00_tour.pass_chips import PassChips

LISTS = {
    "llama3": "none", "llama3_block_bucketing": "bucketing", "tour": "all four of this lesson",
    "llama3_checkpointing_full_inductor_block_bucketing_cudagraph":
        "decomposition, checkpointing, bucketing, Inductor, CUDA graphs",
}
WEIGHTS = "wq", "wk", "wv", "wo", "w1", "w3", "w2"
"""The weights of a layer's matmuls, in the order of the forward."""
SUMMED = "wo", "w2"
"""Those whose results a reduce-scatter sums: checkpointing saves the sums in any case."""
LOSS, COSINE = 0.01, 0.9  # the most percent that a loss may differ, and the largest cosine of the gradients
ROUNDING = 1e-4  # percent: a first loss that differs by more has another forward


def largest_difference(right: Report, other: Report) -> str:
    """The largest difference of two runs' losses, in percent, rounded up to a hundredth."""
    return f"no loss differs by more than {ceil(100 * max(differences(right, other))) / 100:.2f} %"


def differences(right: Report, other: Report) -> list[float]:
    """How far each loss of `other` is from that of `right`, in percent."""
    losses = [report.training.losses for report in (right, other) if report.training]
    return [100 * abs(loss / wanted - 1) for wanted, loss in zip(*losses, strict=True)]


def pass_by_pass(chips: PassChips, recipe: Recipe) -> Table:
    """Figures of a step on one rank, from no pass to all of the recipe's, one more in each row."""
    joint, later = ([spec.name for spec in part] for part in (recipe.joint_passes, recipe.passes))
    rows = []
    for n in range(len(joint) + len(later) + 1):
        lists = tuple(joint[:n]), tuple(later[:max(0, n - len(joint))])
        found = chips.runs[lists]["figures"]
        title = f"+ {[*joint, *later][n - 1]}" if n else "no passes"
        rows.append((title, found["launches"], found["bytes saved"], found["peak bytes"]))
    return Table("one training step on a rank, pass by pass", ("passes", "collectives", "saved bytes", "peak bytes"),
                 tuple(rows))


def matmuls_of_a_layer(study: Study) -> Table:
    """The matmuls of the one layer in the order of the forward, and what keeping each would add."""
    nodes = [n for n in study.joint.graph.graph.nodes if n.target is torch.ops.aten.mm.default]
    rows = [(i, weight, 0 if weight in SUMMED else node.meta["val"].nbytes)
            for i, (weight, node) in enumerate(zip(WEIGHTS, nodes, strict=False), 1)]
    return Table("matmuls of the layer", ("number", "weight", "bytes added if saved"), tuple(rows))


def recorded_steps() -> Table:
    """The median step of each recorded run of some lists of passes on four GPUs, launches, and the peak."""
    runs = [run for run in json_lines(results_dir() / "llama3_1b_h200x4.jsonl")
            if {"dp_shard": 2, "tp": 2}.items() <= run["recipe"]["mesh"].items()]
    rows = []
    for variant, passes in LISTS.items():
        found = [run for run in runs if run["variant"] == variant]
        steps = ", ".join(f"{ms:.0f}" for ms in sorted(run["step_ms"] for run in found))
        peak = max(run["peak_gib"] for run in found)
        rows.append((passes, steps, f"{found[0]['launches']:,}", f"{peak:.1f}"))
    columns = "passes", "step of each run, ms", "kernel launches", "peak, GiB"
    return Table("a llama3 of a billion parameters on four H200, dp_shard 2 and tp 2", columns, tuple(rows))


def _numbers(answer: Any, names: Iterable[str]) -> bool:
    return isinstance(answer, Mapping) and all(isinstance(answer.get(name), int | float) for name in names)


def saves_less(answer: Any, *, most: Mapping[str, int], options: Mapping[str, Any] | None = None,
               products: Sequence[str] = ()) -> tuple[float, str, Any]:
    """Grades collectives and saved bytes. The message names those of a layer's `products` that the `options` keep."""
    if not _numbers(answer, most):
        return 0.0, f"give a number for each of {', '.join(most)}", ()
    why = {"collectives": ": the backward repeats the layer's reduce-scatters"}
    over = [name for name, limit in most.items() if answer[name] > limit]
    said = [f"{answer[name]:,} {name}, {most[name]:,} allowed" + why.get(name, "") * (name in over) for name in most]
    if options is not None and products and options.get("policy", "selective") == "selective":
        n = options.get("every_nth_matmul", 2)
        said.append(f"n = {n} saves {', '.join(products[n - 1 :: n]) or 'no matmul'}")
    figures = tuple((name, answer[name], most[name]) for name in most)
    return 1 - len(over) / len(most), "; ".join(said), figures


def compared(right: Report, train: Callable[[], Report], gradient: Callable[..., Any]) -> dict[str, Any]:
    """What `unnoticed` grades: the losses of `right` against those of `train()`, whose first pass puts `gradient` in
    place of `g.t() @ x`, and the cosine of both for a random g [64, 32] and x [64, 48].
    """
    draw = torch.Generator().manual_seed(0)
    g, x = (torch.randn(64, width, generator=draw) for width in (32, 48))
    try:
        found = train()
        cosine = F.cosine_similarity(gradient(g, x).flatten(), (g.t() @ x).flatten(), dim=0).item()
    except WorkbenchError as error:
        return {"stopped": str(error).splitlines()[0]}
    off = differences(right, found)
    failed = [v.check for v in found.passes[0].verdicts if v.outcome != "PASS" and v.check != "numerics"]
    return {"loss": max(off), "first loss": off[0], "cosine": cosine, "failed": failed}


def unnoticed(answer: Any) -> tuple[float, str]:
    """Grades a wrong pass: how many percent a loss and the first loss differ at most, the cosine of its gradient with
    the right one, and the other checks that did not pass. A gradient of the right direction hides nothing: it scores 0.
    An answer with `stopped` did not run.
    """
    if isinstance(answer, Mapping) and "stopped" in answer:
        return 0.0, f"the run stopped: {answer['stopped']}"
    if not _numbers(answer, ("loss", "first loss", "cosine")):
        return 0.0, "give the figures of a run"
    loss, cosine, failed = answer["loss"], answer["cosine"], answer["failed"]
    hidden, elsewhere = loss <= LOSS, cosine <= COSINE
    why = ("the first loss differs, so the forward is wrong, too" if answer["first loss"] > ROUNDING else
           "the first loss agrees, but AdamW takes other steps")
    said = [f"no loss differs by more than {LOSS} %" if hidden else
            f"the losses differ by up to {loss:.2f} %, {LOSS} % allowed: {why}",
            f"the cosine with the right gradient is {cosine:.2f}" + f", at most {COSINE} wanted" * (not elsewhere)]
    if failed:
        said.append(f"{', '.join(failed)} did not pass")
    return elsewhere * (1 + hidden + (not failed)) / 3, "; ".join(said)
