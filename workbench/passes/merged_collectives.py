"""What both bucketing passes need: the count of launches, which their effects compare, and metadata of merged nodes."""

from __future__ import annotations

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.read.memory import parameter_gathers
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs
from workbench.recipe.contracts import Options
from workbench.recipe.wording import counted
from workbench.torch_api.ops import calls_of, collective_kind


def _launches(graphs: Graphs) -> dict[str, int]:
    def count(kind: str) -> int:
        return sum(len(calls_of(graph.graph, lambda target: collective_kind(target) == kind)) for graph in graphs)

    return {kind: count(kind) for kind in ("all_gather", "reduce_scatter")}


def launches_saved(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Fewer all-gathers and reduce-scatters than before, over forward and backward."""
    was, now = _launches(before), _launches(after)
    fewer = sum(now.values()) < sum(was.values())
    return Effect(fewer, "" if fewer else _why_none(before), {"before": was, "after": now})


def _why_none(graphs: Graphs) -> str:
    gathers = sum(len(parameter_gathers(g)) for g in graphs)
    if not gathers:
        sizes = facts_of(graphs[0]).group_sizes
        return f"no parameter is gathered in this graph (process groups: {sizes or 'none'})"
    return f"{counted(gathers, 'gather')} of parameters, each alone in its bucket or in none"


def without_region(gm: GraphModule, names: set[str]) -> GraphModule:
    """The nodes that are not in `names` leave their region: they serve several modules, with the metadata of one."""
    for node in gm.graph.nodes:
        if node.name not in names:
            node.meta.pop("custom", None)
    return gm
