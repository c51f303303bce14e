"""The backward of a stage in two halves: what the stage before waits for, and the rest."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch.fx import GraphModule, Node

from workbench.graph.list_schedule import constraints
from workbench.graph.pieces import named_outputs
from workbench.graph.read.nodes import reachable
from workbench.graph.read.peak import freed_by_graph
from workbench.graph.read.timeline import costs_of
from workbench.lab.pipeline.torch_api import is_sent_gradient
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import EstimateOptions
from workbench.torch_api.ops import aliased_inputs, own_bytes


def second_half(gm: GraphModule) -> list[Node]:
    """The operators that no sent gradient needs; of a backward that sends nothing, all."""
    starts = [node for node, desc in named_outputs(gm) if is_sent_gradient(desc)]
    needs = constraints(gm)
    first = reachable(starts, needs.__getitem__)
    return [n for n in gm.graph.nodes if n.op == "call_function" and n not in first]


def held_bytes(second: list[Node], shared: Container[str] = ()) -> int:
    """Bytes that only the second half frees: of its inputs, but for parameters and what all microbatches share."""
    read = {n for node in second for n in node.all_input_nodes}.difference(second)
    read = {n for n in read if n.name not in shared}
    kept = [n for n in read if n.op != "placeholder" or freed_by_graph(n, True)]
    return sum(own_bytes(n) for n in kept if not aliased_inputs(n))


def halves(before: Graphs, after: Graphs, options: EstimateOptions) -> Effect:
    """The second half stands behind the first. Figures: the bytes that it holds longer, and the estimated milliseconds
    that it no longer keeps the stage before waiting.
    """
    graph = after[-1]
    calls, second = [n for n in graph.graph.nodes if n.op == "call_function"], second_half(graph)
    first = len(calls) - len(second)
    if not first:
        return Effect(False, "no gradient is sent: this is not the backward of a later stage", {})
    ms = costs_of(graph, options.device).compute
    evidence = {
        "first": first,
        "second": len(second),
        "held_bytes": held_bytes(second),
        "moved_ms": sum(ms.get(n, 0.0) for n in second),
    }
    apart = calls[first:] == second
    return Effect(apart, "" if apart else "operators of both halves are mixed", evidence)


@register_pass("split_backward", effect=halves)
def split_backward(
    gm: GraphModule, example_inputs: list[Any], *, options: EstimateOptions
) -> GraphModule:
    """Move what no sent gradient needs behind the rest."""
    for node in second_half(gm):
        gm.graph.output_node().prepend(node)
    gm.recompile()
    return gm
