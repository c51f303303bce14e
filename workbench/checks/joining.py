"""What the checks find of the join of forward, backward and optimizer, before any pass of the joined graph runs."""

from __future__ import annotations

import operator
from collections import Counter

from torch.fx import Node

from workbench.checks import collectives, lint
from workbench.checks.order import kept_after
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import Known
from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.graph.read.nodes import lists_of_update, output_values, updates_of
from workbench.graph.step_graph import StepGraph
from workbench.recipe.wording import counted
from workbench.torch_api.aot import is_state, parameter_of
from workbench.torch_api.ops import calls_of, op_name, tensor_bytes, written_inputs


def check(known: Known) -> list[Verdict]:
    """The verdicts of lint, collectives and, where a pass chose one, the order; none where nothing was joined."""
    return [] if known.joined is None else known.reading(_of_known)


def _of_known(known: Known) -> list[Verdict]:
    return of_joined(known.joined)


def of_joined(joined: StepGraph) -> list[Verdict]:
    """`check` of a step as it was joined."""
    found = [_lint(joined), _collectives(joined)]
    order = joined.facts.order
    if order is not None and order.hidden:
        found.append(kept_after(order, joined.graphs, "the joined graph"))
    return found


def _lint(joined: StepGraph) -> Verdict:
    graph = joined.graph
    problems = [*lint.form(graph), *lint.unwaited(graph), *lint.stale_reads(graph), *_updates(joined), *_sums(joined)]
    if problems:
        return Verdict("lint", Outcome.FAIL, "; ".join(problems[:3]), {"problems": problems})
    text = f"{len(joined.trained)} parameters, each updated once, from its own gradient"
    evidence = {"nodes": len(graph.graph.nodes)}
    if joined.microbatches > 1:
        first = {terms[0] for terms in joined.terms}
        held = sum(tensor_bytes(n.meta["val"]) for n in graph.graph.nodes if n.name in first)
        text += f"; the sums of {joined.microbatches} microbatches' unsharded gradients hold {held:,} bytes a rank"
        evidence |= {"microbatches": joined.microbatches, "accumulated_bytes": held}
    return Verdict("lint", Outcome.PASS, text, evidence)


def _sums(joined: StepGraph) -> list[str]:
    """Whether the update depends on each microbatch as on the first: the terms of each sum by equally many paths, and
    each from rows of its own.
    """
    if joined.microbatches == 1:
        return []
    nodes = {node.name: node for node in joined.graph.graph.nodes}
    rows, paths = dict[Node, int](), Counter[Node](updates_of(joined.graph))
    for node in nodes.values():
        rows[node] = max([_rows_of(node, joined.microbatches), *map(rows.__getitem__, node.all_input_nodes)])
    for node in reversed(nodes.values()):
        paths[node] += sum(paths[user] for user in node.users)
    problems = []
    for terms in joined.terms:
        first, *later = [(paths[nodes[name]], rows[nodes[name]]) if name in nodes else (0, -1) for name in terms]
        for i, (name, (count, read)) in enumerate(zip(terms[1:], later, strict=True), 1):
            if count != first[0] or not count:
                problems.append(f"{counted(count, 'path')} from {name} of microbatch {i} to the update, and {first[0]} "
                                f"from {terms[0]} of microbatch 0: each must count once")
            elif read not in (i, -1):
                problems.append(f"{name} of microbatch {i} reads the rows of microbatch {read}")
    return problems


def _rows_of(node: Node, microbatches: int) -> int:
    """The microbatch whose rows of an input a node takes; -1 for any other node."""
    source = node.args[0] if op_name(node.target) == "aten.slice" else None
    if not isinstance(source, Node) or source.op != "placeholder" or parameter_of(source) or is_state(source):
        return -1
    start, end = (int(str(at)) for at in node.args[2:4])
    return start // (end - start) if end - start == source.meta["val"].shape[0] // microbatches else -1


def _updates(joined: StepGraph) -> list[str]:
    """Whether the norm reads each gradient, each parameter is updated from its own, and the step count advances."""
    graph, problems = joined.graph.graph, []
    nodes = {node.name: node for node in graph.nodes}
    gradients = {nodes[gradient]: name for name, gradient in joined.gradients.items()}
    norm = output_values(joined.graph)[1]
    reached, todo = set(), [norm]
    while todo:
        node = todo.pop()
        if node not in reached:
            reached.add(node)
            todo += [] if node in gradients else _read_by(node)
    problems += [f"the norm leaves out the gradient of {name!r}" for node, name in gradients.items()
                 if node not in reached]
    updated: Counter[str] = Counter()
    by_input = dict(zip(joined.parameters, joined.trained, strict=True))
    for update in updates_of(joined.graph):
        for parameter, gradient in zip(*lists_of_update(update)[:2], strict=True):
            name = by_input[parameter.name]
            updated[name] += 1
            if (own := _source(gradient, gradients)) != name:
                problems.append(f"parameter {name!r} is updated from the gradient of {own!r}")
            strides = [n.meta["val"].stride() for n in (parameter, gradient)]
            if strides[0] != strides[1]:
                problems.append(f"the gradient of {name!r} has strides {strides[1]}, and the parameter {strides[0]}: "
                                "the fused AdamW would pair the wrong elements")
    problems += [f"parameter {name!r} is updated {updated[name]} times" for name in joined.trained
                 if updated[name] != 1]
    step = next(n for n in graph.find_nodes(op="placeholder") if is_state(n) and n.name == "step")
    if not any(step in written_inputs(n) for n in calls_of(graph, lambda target: "aten.add_" in str(target)
                                                           or "aten.copy_" in str(target))):
        problems.append("the step count is not advanced")
    return problems


def _read_by(node: Node) -> list[Node]:
    """A node's inputs; of one result of a multi-tensor operator, the tensor that it was computed from."""
    found: list[Node] = node.all_input_nodes
    if node.target is operator.getitem and "_foreach" in str(found[0].target):
        return [found[0].all_input_nodes[int(str(node.args[1]))]]
    return found


def _source(node: Node, gradients: dict[Node, str]) -> str | None:
    """The parameter whose gradient this one is, scaled, laid out in another way, or as it is."""
    while node not in gradients:
        if not node.all_input_nodes:
            return None
        copied = "aten.copy" in str(node.target)
        node = node.all_input_nodes[1 if copied else 0]
    return gradients[node]


def _collectives(joined: StepGraph) -> Verdict:
    """PASS if the joined graph has the collectives of each microbatch, and one all-reduce more: that of the norm."""
    after = list_collectives(joined.graph)
    ranks = joined.pair.authored.world.size
    if ranks > 1:
        norms = [c for c in after if c.kind == "all_reduce" and c.group_size == ranks and c.payload == 8]
        if not norms:
            return Verdict("collectives", Outcome.FAIL, "no all-reduce adds up the squared norm of all ranks")
        after.remove(norms[-1])
    found = collectives.conserved(_expected(joined), after, fewer=False)
    return found if ranks == 1 or found.outcome is not Outcome.PASS else Verdict(
        "collectives", Outcome.PASS, f"{found.message}, and an all-reduce of 8 bytes for the norm", found.evidence)


def _expected(joined: StepGraph) -> list[Collective]:
    """The pair's collectives as often as the step runs them: those of activations, and gathers of weights that are not
    kept, once for each microbatch; gathers of weights that are kept, with what they need, and reductions of gradients,
    once.
    """
    forward, backward = joined.pair.graphs
    once = {row.gathered for row in gathered_parameters_kept(forward, backward, copies=True)}
    todo = [n for n in forward.graph.nodes if n.name in once]
    for node in todo:  # and what these gathers need, such as the scale of a weight that travels in float8
        todo += [n for n in node.all_input_nodes if n.name not in once]
        once.add(node.name)
    found = [c for c in list_collectives(forward) for _ in range(1 if c.node in once else joined.microbatches)]
    for c in list_collectives(backward):
        reduces = c.kind in ("reduce_scatter", "all_reduce") and c.axis != "tp"
        found += [c] * (1 if reduces else joined.microbatches)
    return found
