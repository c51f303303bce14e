"""What "Fewer bits, proved" measures and asks: exact gradients, recorded figures, and its graders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from workbench.authoring.families import find_family
from workbench.authoring.materialise import default_initialise, seed_of
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.lower import compile_step
from workbench.graph.partition import partition
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import provenance
from workbench.notebook.lessons.grading import by_cases, by_slips, exact
from workbench.pipeline.proofs.numerics_proof import real_inputs, revealing
from workbench.pipeline.run_passes import run_joint
from workbench.recipe.recipe import Recipe
from workbench.tools.compatibility import results_dir

RECORDED, TIMED = results_dir() / "float8_numerics_gloo.json", results_dir() / "float8_products_h200.json"
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


class _Casts(Interpreter):
    """Notes for each cast to float8 in the backward which share of the values is 0 then, by module."""

    def __init__(self, gm: GraphModule):
        super().__init__(gm)
        self.zeros: dict[str, float] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target is torch.ops.prims.convert_element_type.default and value.dtype == TYPE:
            where = provenance(n)
            if where.backward:
                self.zeros[where.module] = float((value.float() == 0).float().mean())
        return value


def underflowing(joint: JointGraph, passes: Sequence[Any]) -> dict[str, float]:
    """Which share of its values is 0 after a float8 cast in the backward, by module, in the order of the backward.

    Values that were 0 before count: others that cancel to 0 on one CPU are tiny on another. Inputs vary as for a
    numerics verdict. With rowwise scales a module has two casts, and the last one counts.
    """
    graph, step = joint.fork(), compile_step(partition(joint.fork()))
    run_joint(graph, passes)
    primals, tangents = real_inputs(step, joint.authored.example_batch())
    with revealing(primals, tangents) as varied, torch.no_grad():
        (seen := _Casts(graph.graph)).run(*primals, *varied)
    return seen.zeros


def _recorded(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise WorkbenchError(f"{path}: no such file of recorded results")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def recorded_losses() -> dict[str, list[float]]:
    """The losses of 200 steps on text that benchmarks/float8_numerics.py recorded, by variant."""
    found: dict[str, list[float]] = _recorded(RECORDED)["losses"]
    return found


def recorded_gradients() -> dict[str, dict[str, float]]:
    """Each gradient's distance to float64's in the debug model, of all layers the largest; by variant and name."""
    found: dict[str, dict[str, float]] = _recorded(RECORDED)["gradients"]
    return found


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


def casts(gm: GraphModule) -> int:
    """How many operators of the graph make float8 numbers from wider ones."""
    made = gm.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
    return sum(node.meta["val"].dtype.itemsize == 1 for node in made)


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


def _fewest(cast: int) -> int:
    """The fewest readers with which `cast` bytes a number, and 1 a reader, are fewer than 2 a reader."""
    return next(readers for readers in range(1, 100) if cast + readers < 2 * readers)


def counts_readers(answer: Any) -> tuple[float, str]:
    """Grades (readers, readers): with a kernel of its own for the amax, and with the amax found by x's kernel."""
    if not isinstance(answer, Sequence) or isinstance(answer, str) or len(answer) != 2:
        return 0.0, "give two numbers"
    said = []
    for name, got, cast in zip(("apart", "fused"), answer, (5, 3), strict=True):
        score, message = exact(got, truth=_fewest(cast))
        if score < 1:
            said.append(f"{name}: both move as many bytes" if got == _fewest(cast) - 1 else f"{name}: {message}")
    return 1 - len(said) / 2, "; ".join(said) or "right"


def sums_over(answer: Any) -> tuple[float, str]:
    """Grades a mapping from each product of a linear layer to the dimension that it sums over."""
    if not isinstance(answer, Mapping):
        return 0.0, "give a dict"
    wanted = dict(zip(PRODUCTS, ("inputs", "outputs", "tokens"), strict=True))
    to_do = [name for name in wanted if answer.get(name) is None]
    wrong = [name for name, dim in wanted.items() if name not in to_do and str(answer[name]).strip().lower() != dim]
    said = [f"{what}: {', '.join(names)}" for what, names in (("wrong", wrong), ("to do", to_do)) if names]
    return 1 - len(wrong + to_do) / len(wanted), "; ".join(said) or "right"


def counts_casts(answer: Any, *, of: GraphModule) -> tuple[float, str]:
    """Grades a number of casts by those of a graph; names two wrong ways to count."""
    products = of.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default)
    return by_slips(answer, casts(of), {
        "too high: no cast is shared": 2 * len(products), "too low: one cast for each tensor": _tensors_cast(of)})


def _tensors_cast(gm: GraphModule) -> int:
    """How many tensors are cast, each counted once however often it is, in a graph of bfloat16."""
    made = gm.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
    owner = roots(gm)
    wide = [node.args[0].args[0] for node in made if node.meta["val"].dtype.itemsize == 1]  # scaled in float32
    return len({owner[node.args[0]] for node in wide})


def counts_bytes(answer: Any, *, of: PassRecord) -> tuple[float, str]:
    """Grades the bytes by which a pass made the collectives of its joint graph smaller."""
    before, after = (list_collectives(graphs[0]) for graphs in (of.before, of.after))
    truth = sum(c.payload for c in before) - sum(c.payload for c in after)
    added = sum(c.payload for c in after if c.reduce_op == "max")
    return by_slips(answer, truth, {
        "the scales travel, too": truth + added, "the scales are no saving": truth + 2 * added,
        "one scale for all weights": truth + added - 4} if added else {})
