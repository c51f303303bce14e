"""An order of a graph's nodes, made by hand, as a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.facts import Part, facts_of
from workbench.graph.read.timeline import Costs, costs_of
from workbench.passes.effect import Effect
from workbench.passes.overlap_collectives import OverlapOptions, less_exposed
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import CONTRACTS, EstimateOptions
from workbench.recipe.sections import PassSpec

NAME = "given_order"


class OrderOptions(EstimateOptions):
    """order: the names of all nodes of one graph. part: which graph. fused: as in overlap_collectives."""

    order: list[str]
    part: Part = "forward"
    fused: bool = False


def order_pass(order: Sequence[str], part: Part = "forward", *, device: str = "h100") -> PassSpec:
    """A pass for a recipe's or a study's `passes`: the nodes of the forward or the backward in this order.

    The pass raises WorkbenchError for an order that is no permutation of that graph's nodes. An order in which a node
    stands before what it reads fails the verdict lint.
    """
    if NAME not in CONTRACTS:
        register_pass(NAME, stage="partitioned", numerics="exact", changes="the same nodes in the order that was given",
                      options=OrderOptions, effect=waits_less, order_costs=_costs)(given_order)
    return PassSpec(name=NAME, options={"order": list(order), "part": part, "device": device})


def difference(order: Sequence[str], gm: GraphModule) -> str:
    """How the order differs from a permutation of the graph's nodes, in words; "" for a permutation."""
    part, own = facts_of(gm).part, [n.name for n in gm.graph.nodes]
    missing, unknown = [n for n in own if n not in set(order)], [n for n in order if n not in set(own)]
    twice = [n for n, times in Counter(order).items() if times > 1]
    problems = [f"{len(found)} {what}, {found[0]} first" for what, found in (
        ("names are not in the graph", unknown), ("nodes are missing", missing), ("names stand twice", twice)) if found]
    if not problems:
        return ""
    whole = "is of another graph" if len(unknown) > len(own) / 2 else "is no permutation of the graph's nodes"
    return f"the order {whole} ({part}, {len(own)} nodes): " + "; ".join(problems)


def reorder(gm: GraphModule, order: Sequence[str]) -> None:
    """Put the nodes of a graph in this order, in place; raises WorkbenchError where it is no permutation of them."""
    if problem := difference(order, gm):
        raise WorkbenchError(problem)
    nodes = {n.name: n for n in gm.graph.nodes}
    first = next(iter(gm.graph.nodes))
    if first.name != order[0]:
        first.prepend(nodes[order[0]])
    for before, after in pairwise(order):
        nodes[before].append(nodes[after])


def waits_less(before: Graphs, after: Graphs, options: OrderOptions) -> Effect:
    """Compute waits for collectives for less time than in the order before, as estimated over forward and backward."""
    found = less_exposed(before, after, OverlapOptions(device=options.device, fused=options.fused))
    was, now = found.evidence["exposed_ms"]
    if found.happened or not was:
        return found
    reason = f"forward and backward expose {now} ms, and {was} ms in the order before, as estimated"
    return Effect(False, reason, found.evidence)


def given_order(gm: GraphModule, example_inputs: list[Any], *, options: OrderOptions) -> GraphModule:
    """Reorder the graph that the order is of; the other one stays."""
    if facts_of(gm).part == options.part:
        reorder(gm, options.order)
    return gm


def _costs(options: OrderOptions, gm: GraphModule) -> Costs:
    return costs_of(gm, options.device, fused=options.fused)
