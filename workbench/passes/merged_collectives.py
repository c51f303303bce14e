"""The effect of both bucketing passes: fewer launches of all-gathers and reduce-scatters."""

from __future__ import annotations

from workbench.graph.facts import facts_of
from workbench.graph.read.memory import parameter_gathers
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs
from workbench.recipe.contracts import Options
from workbench.recipe.wording import counted
from workbench.torch_api.ops import calls_of, collective_kind


def launches_saved(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Fewer all-gathers and reduce-scatters than before, over forward and backward."""
    was, now = _launches(before), _launches(after)
    evidence = {"before": was, "after": now}
    if sum(now.values()) < sum(was.values()):
        return Effect(True, "", evidence)
    gathers = sum(len(parameter_gathers(graph)) for graph in before)
    if gathers:
        reason = f"{counted(gathers, 'gather')} of parameters, each alone in its bucket or in none"
    else:
        groups = facts_of(before[0]).group_sizes or "none"
        reason = f"no parameter is gathered in this graph (process groups: {groups})"
    return Effect(False, reason, evidence)


def _launches(graphs: Graphs) -> dict[str, int]:
    count = {"all_gather": 0, "reduce_scatter": 0}
    for graph in graphs:
        for node in calls_of(graph.graph, lambda target: collective_kind(target) in count):
            count[str(collective_kind(node.target))] += 1
    return count
