"""The plan is held against the tags, and against what the partitioner made of them."""

from __future__ import annotations

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.timeline import costs_of
from workbench.graph.saving.partitioner import repeated
from workbench.graph.saving.plan import MemoryPlan
from workbench.lab.memory_budget import BudgetOptions
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs
from workbench.torch_api.ops import short_name


def planned(before: Graphs, after: Graphs, options: BudgetOptions) -> Effect:
    """Nodes have tags that they did not have before, by a plan within the budget."""
    plan = facts_of(after[0]).plan
    if plan is None or not plan.choices:
        return Effect(False, "the backward reads nothing that the forward computes", {})
    old = {n.name: n.meta.get("recompute") for n in before[0].graph.nodes}
    tagged = sum(n.meta.get("recompute") != old.get(n.name) for n in after[0].graph.nodes)
    evidence = {"budget": plan.budget, "saved_bytes": plan.saved_bytes, "least_bytes": plan.least,
                "recomputed_ms": round(plan.ms, 4), "bound_ms": round(plan.bound_ms, 4), "gap": round(plan.gap, 4),
                "tagged_nodes": tagged, "estimated_for": plan.device}
    return Effect(bool(tagged), "" if tagged else "every node was tagged before", evidence)


def kept(graphs: Graphs, options: BudgetOptions) -> Effect:
    """What is saved is what the plan saves; it fits the budget; and the backward computes again what the plan says."""
    forward, backward = graphs
    plan = facts_of(forward).plan
    if plan is None:
        return Effect(False, "the partitioned graphs have no plan", {})
    rows = [row for row in saved_tensors(forward, backward) if row.held_bytes]
    held = sum(row.held_bytes for row in rows)
    wanted = {c.name for c in plan.saved}
    beyond = [row.name for row in rows if wanted.isdisjoint(row.alias)]
    missing = sorted(wanted - {name for row in rows for name in row.alias})
    again = set(repeated(forward, backward))
    lost = [c.name for c in plan.choices if c.choice == "recompute" and c.ms and not c.fixed and c.name not in again]
    counted, taken = _products(plan, backward, again, options)
    problems = [
        f"saved beyond the plan: {', '.join(beyond[:3])}" if beyond else "",
        f"planned and not saved: {', '.join(missing[:3])}" if missing else "",
        f"planned to be computed again, and not found in the backward: {', '.join(lost[:3])}" if lost else "",
        f"{held:,} bytes are saved, and the budget is {plan.budget:,}" if held > plan.budget else "",
        f"the plan counts {counted:.4g} ms for the products that run again, and they take {taken:.4g} ms"
        if counted < taken / 2 else "",
    ]
    evidence = {"saved_bytes": held, "budget": plan.budget, "saved": len(rows), "beyond": beyond, "missing": missing,
                "not_repeated": lost}
    reason = "; ".join(filter(None, problems))
    return Effect(not reason, reason, evidence)


def _products(plan: MemoryPlan, backward: GraphModule, again: set[str], options: BudgetOptions) -> tuple[float, float]:
    """Milliseconds of the products and attentions that run again: as the plan has them, and by the backward's graph.

    Both 0 where times were measured: the file of rank 0 is not at hand.
    """
    if options.estimates == "measured":
        return 0.0, 0.0
    costs = costs_of(backward, options.device, fused=options.fused).compute
    taken = {n: ms for n, ms in costs.items() if n.name in again and is_compute(n)}
    operators = {short_name(n) for n in taken}
    counted = [c.ms for c in plan.choices if c.choice == "recompute" and c.operator in operators]
    return sum(counted), sum(taken.values())
