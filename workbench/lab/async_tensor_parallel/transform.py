"""Find the collectives beside products, decide which share an operator, and say why the others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.products.beside_collectives import BesideProducts, beside_products
from workbench.graph.products.fuse import added_bytes, fuse, workspace_bytes
from workbench.graph.read.collectives import axis_names, list_collectives
from workbench.graph.read.cost import collective_ms, device_spec, node_ms
from workbench.graph.read.timeline import costs_of, not_hidden, simulate
from workbench.lab.async_tensor_parallel import AsyncTensorParallelOptions
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.torch_api.distributed import symmetric_memory
from workbench.torch_api.ops import calls_of, multiplies

_NEEDS = "the operators need GPUs that read each other's memory"


def chosen(gm: GraphModule, options: AsyncTensorParallelOptions) -> Iterator[tuple[BesideProducts, str]]:
    """Each collective beside products, and why it does not share an operator with them; "" where it does."""
    spec = device_spec(options.device)
    for each in beside_products(gm):
        missed = each.missed
        if not missed and options.choose == "paying":
            sending, multiplying = collective_ms(each.collective, spec), sum(node_ms(p, spec) for p in each.products)
            hidden = sending - not_hidden(sending, multiplying, each.collective.group_size)
            if (paid := spec.moving_ms(added_bytes(each))) >= hidden:
                missed = "its copies would take longer than what they hide, as estimated"
                missed += f" (the first: {paid:.3f} ms against {hidden:.3f})"
        yield each, missed


def fused_with_products(before: Graphs, after: Graphs, options: AsyncTensorParallelOptions) -> Effect:
    """Collectives of the tp axis share operators with products. Says how many do not, and why."""
    found = [pair for gm in before for pair in chosen(gm, options)]
    fused = sum(len(calls_of(gm.graph, multiplies)) for gm in after)
    reasons: dict[str, list[str]] = {}
    for _, missed in found:
        if missed:
            reasons.setdefault(missed.partition(" (the first: ")[0], []).append(missed)
    told = [f"{len(each)}: {each[0]}" for each in reasons.values()]
    axis = [c for gm in before for c in list_collectives(gm) if c.axis == "tp"]
    sizes = Counter({each.collective.group: 0 for each, _ in found})
    for each, missed in found:
        if not missed:
            sizes[each.collective.group] = max(sizes[each.collective.group], workspace_bytes(each))
    evidence = {"fused": fused, "eligible": len(found), "missed": {key: len(many) for key, many in reasons.items()},
                "without_a_product": len(axis) - len(found), "workspace_bytes": sum(sizes.values()),
                "tp_exposed_ms": [round(sum(_exposed(gm, options) for gm in graphs), 4) for graphs in (before, after)]}
    if not axis:
        return Effect(False, "no collective runs over the tp axis: set mesh.tp to 2 or more", evidence)
    counted = f"{fused} of {len(found)} collectives beside products share an operator with them"
    said = "; ".join([counted, *told])
    world = facts_of(before[0]).world
    if world == "fake":
        return Effect(None if fused else False, f"{said}; {_NEEDS}, and a fake world has none", evidence)
    if not fused and world != "nccl":
        return Effect(False, f"0 of {len(found)} collectives beside products: {_NEEDS}, and these ranks run on "
                             f"{'CPUs over gloo' if world == 'gloo' else f'{world}, in one process'}", evidence)
    if not fused and (lacking := _lacking(before)):
        return Effect(False, f"0 of {len(found)} collectives beside products: {lacking}", evidence)
    return Effect(fused > 0, said if told or not fused else "", evidence)


def _exposed(gm: GraphModule, options: AsyncTensorParallelOptions) -> float:
    """How long compute waits for the collectives of the tp axis, as estimated, in milliseconds."""
    axes = axis_names(gm)
    clock = simulate(gm.graph.nodes, costs := costs_of(gm, options.device, fused=True))
    return sum(ms for node, ms in clock.exposed.items() if axes.get(costs.group[node]) == "tp")


def _lacking(graphs: Graphs) -> str:
    """What the machine lacks for the groups of the tp axis; every rank calls it."""
    groups = sorted({each.collective.group for gm in graphs for each in beside_products(gm)})
    return next(filter(None, map(symmetric_memory.missing_for, groups)), "")


@register_pass("async_tensor_parallel", effect=fused_with_products)
def async_tensor_parallel(
    gm: GraphModule, example_inputs: list[Any], *, options: AsyncTensorParallelOptions
) -> GraphModule:
    """Where the ranks are GPUs that read each other's memory, or fake: one operator for each chosen collective."""
    world = facts_of(gm).world
    if world not in ("nccl", "fake") or (world == "nccl" and _lacking((gm,))):
        return gm
    together = [each for each, missed in chosen(gm, options) if not missed]
    if world == "nccl":
        for group in sorted({each.collective.group for each in together}):
            symmetric_memory.reserve(group, max(workspace_bytes(e) for e in together if e.collective.group == group))
    fuse(gm, together)
    return gm
