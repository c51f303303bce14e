"""What the checks find of the join of forward, backward and optimizer, before any pass of the joined graph runs."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from torch.fx import Node

from workbench.checks import collectives, lint
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import inputs_written
from workbench.graph.read.nodes import lists_of_update, output_values, reachable, updates_of
from workbench.torch_api.aot import is_state, parameter_of

Joined = Any  # a StepGraph, whose module imports this one

def of_joined(joined: Joined) -> list[Verdict]:
    """The verdicts of lint, collectives and, where a pass chose one, the order."""
    verdicts = [_lint(joined), _collectives(joined)]
    order = joined.facts.order
    if order is not None and order.hidden:
        verdicts.append(order.kept_after(joined.graphs, "the joined graph"))
    return verdicts


def _lint(joined: Joined) -> Verdict:
    graph = joined.graph
    problems = [*lint.form(graph), *lint.unwaited(graph), *lint.stale_reads(graph), *_of_norm(joined),
                *_of_updates(joined)]
    if problems:
        return Verdict("lint", Outcome.FAIL, "; ".join(problems[:3]), {"problems": problems})
    return Verdict("lint", Outcome.PASS, f"{len(joined.trained)} parameters, each updated once, from its own gradient",
                   {"nodes": len(graph.graph.nodes)})


def _gradients(joined: Joined) -> dict[Node, str]:
    """The parameter of each node that is a gradient."""
    nodes = {node.name: node for node in joined.graph.graph.nodes}
    return {nodes[gradient]: name for name, gradient in joined.gradients.items()}


def _of_norm(joined: Joined) -> list[str]:
    """Whether the norm reads each gradient."""
    gradients, norm = _gradients(joined), output_values(joined.graph)[1]
    reached = reachable([norm], lambda node: [] if node in gradients else _read_by(node))
    return [f"the norm leaves out the gradient of {name!r}" for node, name in gradients.items() if node not in reached]


def _of_updates(joined: Joined) -> list[str]:
    """Whether each parameter is updated once, from its own gradient, and the step count advances."""
    problems, updated = list[str](), Counter[str | None]()
    gradients = _gradients(joined)
    for update in updates_of(joined.graph):
        for parameter, gradient in zip(*lists_of_update(update)[:2], strict=True):
            name, source = parameter_of(parameter), _source(gradient, gradients)
            updated[name] += 1
            if source != name:
                problems.append(f"parameter {name!r} is updated from the gradient of {source!r}")
            strides = [node.meta["val"].stride() for node in (parameter, gradient)]
            if strides[0] != strides[1]:
                problems.append(f"the gradient of {name!r} has strides {strides[1]}, and the parameter {strides[0]}: "
                                "the fused AdamW would pair the wrong elements")
    problems += [f"parameter {name!r} is updated {updated[name]} times" for name in joined.trained
                 if updated[name] != 1]
    if not any(is_state(node) and node.name == "step" for node in inputs_written(joined.graph)):
        problems.append("the step count is not advanced")
    return problems


def _read_by(node: Node) -> list[Node]:
    """A node's inputs; of one result of a multi-tensor operator, the tensor that it was computed from."""
    inputs: list[Node] = node.all_input_nodes
    if node.target is operator.getitem and "_foreach" in str(inputs[0].target):
        return [inputs[0].all_input_nodes[int(str(node.args[1]))]]
    return inputs


def _source(node: Node, gradients: dict[Node, str]) -> str | None:
    """The parameter whose gradient this one is, scaled, laid out in another way, or as it is."""
    while node not in gradients:
        if not node.all_input_nodes:
            return None
        copied = "aten.copy" in str(node.target)
        node = node.all_input_nodes[1 if copied else 0]
    return gradients[node]


def _collectives(joined: Joined) -> Verdict:
    """PASS if the joined graph has the pair's collectives, and one all-reduce more: that of the norm."""
    after, ranks = list_collectives(joined.graph), joined.pair.authored.world.size
    if ranks > 1:
        norms = [c for c in after if c.kind == "all_reduce" and c.group_size == ranks and c.payload == 8]
        if not norms:
            return Verdict("collectives", Outcome.FAIL, "no all-reduce adds up the squared norm of all ranks")
        after.remove(norms[-1])
    before = [c for graph in joined.pair.graphs for c in list_collectives(graph)]
    kept = collectives.conserved(before, after, fewer=False)
    if ranks == 1 or kept.outcome is not Outcome.PASS:
        return kept
    return Verdict("collectives", Outcome.PASS, f"{kept.message}, and an all-reduce of 8 bytes for the norm",
                   kept.evidence)
