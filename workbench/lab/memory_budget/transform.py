"""Tags for the partitioner, by a plan that is solved on the joint graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.graph.facts import facts_of
from workbench.graph.read.cost import device_spec
from workbench.graph.read.timeline import Estimates, estimates_of
from workbench.graph.saving.choose import choose, fix
from workbench.graph.saving.partitioner import torch_cut
from workbench.graph.saving.plan import MemoryPlan
from workbench.graph.saving.values import Producer, Stored, read_values, repeating_ms, without_tangents
from workbench.lab.memory_budget import BudgetOptions
from workbench.lab.memory_budget.effects import kept, planned
from workbench.passes.registry import register_pass
from workbench.torch_api import partitioning
from workbench.torch_api.ops import world_kind


@register_pass("memory_budget", effect=planned, partition_effect=kept)
def memory_budget(gm: GraphModule, example_inputs: list[Any], *, options: BudgetOptions) -> GraphModule:
    """Tag each forward tensor that the backward needs: saved, or computed again.

    Raises WorkbenchError for a budget below what must be saved, and for a pattern that matches nothing.
    """
    partitioning.save_old_values(gm)
    producers, plan = plan_of(gm, options)
    facts_of(gm).plan = plan
    chosen = {c.name: c.choice for c in plan.choices}
    named = {n.name: n for n in gm.graph.nodes}
    for made in producers:
        for each in made.results:
            _tag(named, made, each, chosen.get(each.node.name))
    for node in without_tangents(gm):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return gm


def plan_of(gm: GraphModule, options: BudgetOptions) -> tuple[list[Producer], MemoryPlan]:
    """The forward's producers, and the plan; rank 0's on all ranks."""
    known: Estimates = estimates_of(gm, options)
    spec = device_spec(options.device)
    seen = partitioning.merged(gm) if facts_of(gm).partitioner else gm
    ms = repeating_ms(seen, spec, known, options.fused)
    producers = read_values(seen, ms, collectives=options.collectives)
    now = 0 if options.gib is not None else torch_cut(gm, producers).bytes
    fix(producers, options.keep, options.recompute)
    plan = choose(producers, options.bytes(now), f"{spec.name}, {spec.trust}")
    if world_kind() in ("gloo", "nccl"):
        shared = [plan]
        dist.broadcast_object_list(shared, src=0)
        plan = shared[0]
    return producers, plan


def _tag(named: Mapping[str, Node], made: Producer, each: Stored, choice: str | None) -> None:
    """Nodes that the backward does not need stay without a tag: one would ask the partitioner for their inputs."""
    if choice is None or made.decided:
        return
    save, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
    for node in each.views:
        named[node.name].meta["recompute"] = save if choice != "recompute" and node in each.holders else again
    named[made.node.name].meta["recompute"] = save if choice != "recompute" else again
