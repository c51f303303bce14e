"""What "Fewer bits, proved" measures, tabulates and asks: gradients, recorded figures, and its graders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from workbench.authoring.families import find_family
from workbench.authoring.materialise import default_initialise, seed_of
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.lower import compile_step
from workbench.graph.partition import partition
from workbench.graph.read.collectives import list_collectives
from workbench.notebook.draw.picture import Table, table
from workbench.pipeline.proofs.numerics_proof import revealing
from workbench.pipeline.run_passes import run_joint
from workbench.recipe.recipe import Recipe
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.grading import by_cases, by_slips
from workbench_lessons.course.recorded_figures import json_lines

RECORDED, TIMED = results_dir() / "float8_numerics_gloo.json", results_dir() / "float8_products_h200.json"
MODELS = {"llama3 1b": ("float8_h200x2",), "llama3 8b": ("like_8b_h200x2", "float8_8b_h200x2")}
STEPS = {
    "compile": "torch.compile of each block",
    "compile_float8_tensorwise": "torch.compile of each block, torchao float8",
    "llama3_whole_step_fused_cudagraph": "whole step, replayed",
    "llama3_float8_whole_step_cudagraph": "whole step, replayed, float8_matmul",
}
"""Files and variants of recorded steps."""
TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(TYPE).max
PRODUCTS = ("forward", "input gradient", "weight gradient")
Scaled = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def exact_gradients(recipe: Recipe, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Each parameter's gradient in float64, by name: of the recipe's model on one rank, with its first values."""
    module = find_family(recipe.model.family).make(recipe)
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            default_initialise(name, parameter, torch.Generator().manual_seed(seed_of(recipe.training.seed, name)))
    module = module.double()
    module(*batch).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of `wanted`, in float64."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def error_factor(errors: Mapping[str, float]) -> tuple[int, Table, str]:
    """How many times as large as bfloat16's error the tensorwise one is; a table of all errors; why."""
    shown = table("error of one matmul, relative to its norm", ("operands", "error"),
                  [(name, f"{error:.2%}") for name, error in errors.items()])
    return (round(errors["float8, tensorwise"] / errors["bfloat16"]), shown,
            "A bit fewer doubles the error: four bits fewer cost a factor near 2⁴.")


def output_errors(joint: JointGraph, passes: Sequence[Any]) -> dict[str, float]:
    """How far passes move the loss and each parameter's gradient, by name; inputs vary as for a numerics verdict."""
    exact, found = _outputs(joint, []), _outputs(joint, passes)
    return {name: distance(found[name], value) for name, value in exact.items()}


def _outputs(joint: JointGraph, passes: Sequence[Any]) -> dict[str, torch.Tensor]:
    graph, module = joint.fork(), joint.authored.module
    run_joint(graph, passes)
    with revealing(list(module.parameters()), []):
        for parameter in module.parameters():
            parameter.grad = None
        loss = compile_step(partition(graph))(*joint.authored.example_batch())
        loss.backward()
    gradients = {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _recorded(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise WorkbenchError(f"{path}: no such file of recorded results")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def loss_gaps(steps: int = 20) -> dict[str, list[float]]:
    """Recorded losses of 200 steps minus bfloat16's, by variant, each the mean of the last `steps`."""
    losses: dict[str, list[float]] = _recorded(RECORDED)["losses"]
    means = {}
    for name in ("tensorwise", "rowwise", "bfloat16"):
        gap = [a - b for a, b in zip(losses[name], losses["bfloat16"], strict=True)]
        means[name] = [sum(gap[max(0, end - steps):end]) / min(end, steps) for end in range(1, len(gap) + 1)]
    return means


def recorded_products() -> list[tuple[str, str, str, float, float, float]]:
    """Of an H200: model, layers, a weight's shape; ms of bfloat16's products, of tensorwise float8's, of its casts."""
    rows, found = _recorded(TIMED)["rows"], []
    for model, layers in dict.fromkeys((row["model"], row["layers"]) for row in rows):
        own = [row for row in rows if (row["model"], row["layers"]) == (model, layers)]
        shape = next(f"{row['n']} x {row['k']}" for row in own if row["product"] == "forward")
        found.append((model, layers, shape, *(sum(row["count"] * ms(row) for row in own) for ms in (
            lambda row: row["bfloat16_ms"], lambda row: row["tensorwise_fast_ms"],
            lambda row: sum(row["tensorwise_cast_ms"])))))
    return found


def recorded_steps() -> Table:
    """Whole steps on two GPUs in bfloat16 and in float8: every recorded run, and launches."""
    rows = []
    for model, files in MODELS.items():
        runs = [run for file in files for run in json_lines(results_dir() / f"{file}.jsonl")]
        for variant, title in STEPS.items():
            of_variant = sorted((run for run in runs if run["variant"] == variant), key=lambda run: run["step_ms"])
            if of_variant:
                steps = ", ".join(f"{run['step_ms']:.0f}" for run in of_variant)
                rows.append((model, title, steps, f"{of_variant[0]['launches']:,}"))
    return Table("a training step on two H200", ("model", "step", "each run, ms", "launches"), tuple(rows))


def refused(run: Callable[[], object]) -> Table:
    """Why the matmuls of a graph stay as they are, by the error of a pass that converts none."""
    try:
        run()
    except WorkbenchError as error:
        reasons = re.findall(r"(\d+): (.+?), (\S+ \S+) first", str(error))
        rows = tuple((int(count), why, first) for count, why, first in reasons)
        title = f"float8_matmul refuses: {sum(count for count, *_ in rows)} matmuls, and none is left to convert"
        return Table(title, ("matmuls", "stay because", "first of them"), rows)
    raise WorkbenchError("the pass converted something: give it a smaller model or its default options")


def _cases() -> Iterator[tuple[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(16)
    yield "sixteen numbers", torch.randn(4, 4, generator=numbers)
    yield "large numbers", 1e6 * torch.randn(4, 4, generator=numbers)
    yield "a float16 tensor", (1e-6 * torch.randn(4, 4, generator=numbers)).half()
    yield "a bfloat16 tensor", torch.randn(4, 4, generator=numbers).bfloat16()
    yield "zeros", torch.zeros(4, 4)


def casts_well(answer: Any) -> tuple[float, str]:
    """Grades a function from a tensor to (its float8 cast, a float32 scale to multiply that by)."""
    if not callable(answer):
        return 0.0, "give a function of a tensor"
    return by_cases(answer, _cases(), _problem, "sixteen numbers")


def _problem(answer: Scaled, x: torch.Tensor) -> str:
    try:
        value, scale = answer(x.clone())
        if value.dtype != TYPE:
            return f"the cast is {value.dtype}"
        if scale.dtype != torch.float32:
            return f"the scale is {scale.dtype}".replace("torch.", "")
        back = value.float() * scale
    except Exception as error:  # the reader's code
        return f"{type(error).__name__}: {error}"
    if not bool(back.isfinite().all()):
        return "a value is not finite"
    if bool(x.any()) and float(value.float().abs().max()) < LARGEST:
        return f"the largest float8 is {float(value.float().abs().max()):g}"
    far = (back - x.float()).abs() > x.float().abs() / 16 + scale * 2.0**-9
    return f"{int(far.sum())} values are wrong" if bool(far.any()) else ""


def sums_over(answer: Any) -> tuple[float, str]:
    """Grades a mapping from each product of a linear layer to the dimension that it sums over."""
    if not isinstance(answer, Mapping):
        return 0.0, "give a dict"
    wanted = dict(zip(PRODUCTS, ("inputs", "outputs", "tokens"), strict=True))
    to_do = [name for name in wanted if answer.get(name) is None]
    wrong = [name for name, dim in wanted.items() if name not in to_do and str(answer[name]).strip().lower() != dim]
    said = [f"{what}: {', '.join(names)}" for what, names in (("wrong", wrong), ("to do", to_do)) if names]
    return 1 - len(wrong + to_do) / len(wanted), "; ".join(said) or "right"


def counts_bytes(answer: Any, *, of: PassRecord) -> tuple[float, str]:
    """Grades the bytes by which a pass made the collectives of its joint graph smaller."""
    before, after = (list_collectives(graphs[0]) for graphs in (of.before, of.after))
    truth = sum(c.payload for c in before) - sum(c.payload for c in after)
    added = sum(c.payload for c in after if c.reduce_op == "max")
    return by_slips(answer, truth, {
        "the scales travel, too": truth + added, "the scales are no saving": truth + 2 * added,
        "one scale for all weights": truth + added - 4} if added else {})
