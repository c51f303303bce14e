"""What "The tour" shows and asks: recorded step times, and the graders of its two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.notebook.draw.picture import Table
from workbench.recipe.files import json_lines
from workbench.tools.compatibility import results_dir

LISTS = {
    "llama3": "none", "llama3_block_bucketing": "bucketing", "llama3_checkpointing": "checkpointing",
    "llama3_checkpointing_block_bucketing": "checkpointing, bucketing", "tour": "all four of the tour",
    "llama3_checkpointing_full_inductor_block_bucketing_cudagraph":
        "decomposition, checkpointing, bucketing, Inductor, CUDA graphs",
}
RUNS = {"debug model, 2 CPU ranks": ("llama3_debug_gloo", {"dp_shard": 2, "tp": 1}),
        "1B model, 4 H200": ("llama3_1b_h200x4", {"dp_shard": 2, "tp": 2})}
LOSS, GRADIENT = 0.01, 50  # percent: the most that a loss may differ, the least that a gradient must
ROUNDING = 1e-4  # percent: a first loss that differs by more has another forward


def recorded_steps() -> Table:
    """The median step of each recorded run of some lists of passes; on GPUs also kernels, launches and the peak."""
    rows, lengths = [], set()
    for where, (name, mesh) in RUNS.items():
        runs = [run for run in json_lines(results_dir() / f"{name}.jsonl")
                if mesh.items() <= run["recipe"]["mesh"].items()]
        for variant, passes in LISTS.items():
            if found := [run for run in runs if run["variant"] == variant]:
                steps = ", ".join(f"{ms:.0f}" for ms in sorted(run["step_ms"] for run in found))
                lengths |= {len(run["steps_ms"]) for run in found}
                peak = max(run["peak_gib"] for run in found)
                busy = [run.get("kernels_ms", 0.0) for run in found]
                spans = (_span(busy), _span([slowest_products(run) for run in found]))
                of_gpu = (*spans, f"{found[0]['launches']:,}", f"{peak:.1f}") if peak else ("",) * 4
                rows.append((where, passes, steps, *of_gpu))
    columns = ("where", "passes", "step of each run, ms", "computing, ms", "products, ms", "kernel launches",
               "peak, GiB")
    steps = " or ".join(map(str, sorted(lengths)))
    return Table(f"recorded runs: median of {steps} steps; dp_shard 2, on GPUs with tp 2", columns, tuple(rows))


def _span(times: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{ms:.0f}" for ms in (min(times), max(times))))


def slowest_products(run: Mapping[str, Any]) -> float:
    """Milliseconds of a recorded step in the three kernels of matrix products that take longest; 0 on CPUs."""
    return sum(sorted(ms for name, ms in run.get("longest", {}).items() if name.startswith("nvjet"))[-3:])


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
        said.append(f"n = {n} keeps {', '.join(products[n - 1 :: n]) or 'no product'}")
    figures = tuple((name, answer[name], most[name]) for name in most)
    return 1 - len(over) / len(most), "; ".join(said), figures


def unnoticed(answer: Any) -> tuple[float, str]:
    """Grades a wrong pass: how many percent a loss, the first loss and a gradient differ at most; the other checks.

    An answer with `stopped` did not run.
    """
    if isinstance(answer, Mapping) and "stopped" in answer:
        return 0.0, f"the run stopped: {answer['stopped']}"
    if not _numbers(answer, ("loss", "first loss", "gradient")):
        return 0.0, "give the figures of a run"
    loss, gradient, failed = answer["loss"], answer["gradient"], answer["failed"]
    hidden = loss <= LOSS
    wrong = gradient >= GRADIENT - 0.5  # a gradient times 1.5 is wrong by 50 % but for rounding
    why = ("the first loss differs, so the forward is wrong, too: change only what follows `# backward`"
           if answer["first loss"] > ROUNDING else
           "the first loss agrees, so the forward is right, but AdamW takes other steps")
    said = [f"no loss differs by more than {loss:.3f} %" if hidden else
            f"the losses differ by up to {loss:.3f} %, {LOSS} % allowed: {why}",
            f"the worst gradient is wrong by {gradient:.0f} % of its norm" + ", 50 % wanted" * (not wrong)]
    if hidden and not gradient and failed == ["effect"]:
        said = ["the pass changed nothing, so its effect is NO_EFFECT"]
    elif failed:
        said.append(f"{', '.join(failed)} did not pass")
    return (hidden + wrong + (not failed)) / 3, "; ".join(said)
