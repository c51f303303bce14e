"""Have the partition use the budget that the plan has come to, and hold the result against the plan."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.lab.memory_budget import BudgetOptions
from workbench.lab.memory_budget.plan import BUDGET, MemoryPlan, make_plan, read_cut
from workbench.passes.activation_checkpointing import saved_unknown
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass


def planned(before: Graphs, after: Graphs, options: BudgetOptions) -> Effect:
    """The partition is to save less than it would."""
    plan: MemoryPlan = facts_of(after[0]).plan
    less = plan.cut.bytes < plan.before.bytes
    evidence = {"budget": plan.budget, "saved_bytes": plan.cut.bytes, "without": plan.before.bytes,
                "share": plan.cut.share, "longer_ms": round(plan.ms, 4), "estimated_for": plan.device}
    return Effect(less, "" if less else "what is saved without a budget fits", evidence)


def kept(graphs: Graphs, options: BudgetOptions) -> Effect:
    """The partition saves and repeats what the plan says, and fits the budget."""
    plan: MemoryPlan | None = facts_of(graphs[0]).plan
    if plan is None:
        return Effect(False, "the partitioned graphs have no plan", {})
    cut = read_cut(graphs, options, plan.cut.share)
    differences = {
        "saved beyond the plan": set(cut.saved) - set(plan.cut.saved),
        "planned and not saved": set(plan.cut.saved) - set(cut.saved),
        "planned to be computed again, and not in the backward": set(plan.cut.again)
        - set(cut.again),
    }
    problems = [
        f"{kind}: {', '.join(sorted(names)[:3])}" for kind, names in differences.items() if names
    ]
    if cut.bytes > plan.budget:
        problems.append(f"{cut.bytes:,} bytes are saved, and the budget is {plan.budget:,}")
    evidence = {"saved_bytes": cut.bytes, "budget": plan.budget, "saved": len(cut.saved)}
    return Effect(not problems, "; ".join(problems) or saved_unknown(graphs[0]), evidence)


@register_pass("memory_budget", effect=planned, partition_effect=kept)
def memory_budget(
    gm: GraphModule, example_inputs: list[Any], *, options: BudgetOptions
) -> GraphModule:
    """Raises WorkbenchError for a budget below what torch's smallest cut saves."""
    facts = facts_of(gm)
    facts.plan = make_plan(gm, options)
    facts.partition_options[BUDGET] = facts.plan.cut.share
    return gm
