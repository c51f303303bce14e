"""Convert what the options choose, and name the reason for each product that stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Collective
from workbench.lab.float8 import Float8Options
from workbench.lab.float8.linear import MANY, Product, products_of
from workbench.lab.float8.scaled_products import SCALED, TYPES, Float8, cannot
from workbench.lab.float8.weight_gathers import WeightGather, expected_collectives, gather_in_float8, weight_gathers
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.torch_api.devices.float8 import emulate_on_cpu, scaled_products
from workbench.torch_api.ops import is_symbolic, op_name

_EMULATED = "on these CPUs products are emulated in float32, and so nothing is said of time"


def _stays(product: Product, options: Float8Options) -> str:
    """Why the product is not converted; "" for one that is."""
    if kind := MANY.get(product.node.target):
        return f"{kind} product, {op_name(product.node.target)}: only a product of two matrices is converted"
    if not product.which:
        return "belongs to no linear layer"
    if not any(fnmatchcase(product.module, glob) for glob in options.modules):
        return f"outside modules {', '.join(options.modules)}"
    if product.which not in options.products:
        return f"products leaves out {product.which}"
    if any(is_symbolic(operand.meta["val"]) for operand in product.node.all_input_nodes):
        return "its size is known only during the step"
    if (least := min(product.sizes)) < options.smallest:
        return f"size {least} is below smallest, {options.smallest}"
    result = product.node.meta["val"]
    if options.scaling == "rowwise" and result.device.type == "cuda" and result.dtype is not torch.bfloat16:
        return "rowwise scales need a bfloat16 result on a GPU"
    return cannot(product)


def chosen(gm: GraphModule, options: Float8Options) -> tuple[list[Product], dict[str, list[str]]]:
    """(the products to convert, the others' names by the reason why they stay)."""
    taken, left = [], dict[str, list[str]]()
    for product in products_of(gm):
        if why := _stays(product, options):
            left.setdefault(why, []).append(str(product))
        else:
            taken.append(product)
    return taken, left


def products_converted(before: Graphs, after: Graphs, options: Float8Options) -> Effect:
    """Every product that the options choose is a scaled one; the evidence names the reason for each other one, and says
    whether the ranks emulate them. On a fake world nothing runs.
    """
    taken, left = chosen(before[0], options)
    was, now = (len(gm.graph.find_nodes(op="call_function", target=SCALED)) for (gm,) in (before, after))
    now -= was
    every = len(taken) + sum(map(len, left.values()))
    runs_on = taken[0].node.meta["val"].device.type if taken and facts_of(before[0]).world != "fake" else ""
    evidence = {"products": every, "eligible": len(taken), "converted": now, "left": left, "emulated": runs_on == "cpu"}
    said = [f"{now} of {every} products are float8", *(f"{len(names)} stay: {why}" for why, names in left.items())]
    said += [_EMULATED] if runs_on == "cpu" else []
    return Effect(bool(taken) and now == len(taken), "; ".join(said), evidence)


def _gathers(gm: GraphModule, taken: list[Product], options: Float8Options) -> list[WeightGather]:
    return weight_gathers(gm, taken) if options.float8_gathers and options.scaling == "tensorwise" else []


def promised_collectives(before: Graphs, options: Float8Options) -> list[Collective]:
    """Gathers of weights that only converted products read move one byte an element, and scales are agreed on."""
    return expected_collectives(before[0], _gathers(before[0], chosen(before[0], options)[0], options))


def scaled_products_ran(evidence: Mapping[str, Any], names: Counter[str]) -> Effect:
    """One step ran each converted product once, or more often where the backward repeats it."""
    ran, wanted = scaled_products(names), evidence["converted"]
    said = f"{ran} scaled products ran in a step, for {wanted} converted ones"
    return Effect(ran >= wanted, said, {"ran": ran})


def require_float8(device: torch.device) -> None:
    if device.type == "cpu":
        emulate_on_cpu()
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability(device) < (8, 9):
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise WorkbenchError(f"float8_matmul: {name} (sm{major}{minor}) has no float8 products: take a GPU of sm89 or "
                             "later, or drop the pass")


@register_pass("float8_matmul", effect=products_converted, promised=promised_collectives, executed=scaled_products_ran)
def float8_matmul(gm: GraphModule, example_inputs: list[Any], *, options: Float8Options) -> GraphModule:
    """Raises WorkbenchError where nothing is left to convert, or the device has no float8 products."""
    taken, left = chosen(gm, options)
    if not taken:
        reasons = "; ".join(f"{len(names)}: {why}, {names[0]} first" for why, names in left.items())
        raise WorkbenchError(f"float8_matmul: no product is left to convert ({reasons or 'there is none'}): change "
                             "modules, smallest or the model")
    require_float8(taken[0].node.meta["val"].device)
    float8 = Float8(gm, options.scaling == "rowwise", TYPES[options.gradients])
    gathers = _gathers(gm, taken, options)
    for product in taken:
        float8.convert(product)
    gather_in_float8(gm, gathers, {cast.base: cast for cast in float8.casts.values()})
    return gm
