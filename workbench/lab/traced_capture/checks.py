"""Whether the backward of a traced step computes again what the tags ask for, from the values that the forward read."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from workbench.checks.lint import freed_inputs
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import Known, facts_of, reading
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import is_backward, is_compute
from workbench.lab.traced_capture.cut import AGAIN, gradients_of, recomputed
from workbench.recipe.wording import counted
from workbench.torch_api import aot, partitioning
from workbench.torch_api.ops import op_name, written_inputs


def check(known: Known) -> list[Verdict]:
    """The verdict `lint` on the placed recomputation; none before it is placed.

    FAIL also where a pass of the whole step has undone it: forward and backward stand in one graph there, so that
    merging equal nodes would keep the forward's values.
    """
    if known.joint is None or known.partitioned is None:
        return []
    if lost := _undone(known):
        return [lost]
    return [reading(of_pair, known.joint, known.partitioned[1])]


def of_pair(joint: GraphModule, backward: GraphModule) -> Verdict:
    """`check` of a backward. joint: the graph that the recomputation was placed in, before that."""
    repeats = [n for n in backward.graph.nodes if AGAIN in n.meta]
    missing = dict(gradients_of(joint)).keys() - dict(gradients_of(backward)).keys()
    problems = [*(f"the backward returns no gradient of {name!r}" for name in sorted(missing)),
                *_not_placed(joint, backward), *_other_inputs(joint, repeats), *_overwritten(joint, repeats)]
    if problems:
        return Verdict("lint", Outcome.FAIL, "; ".join(problems[:3]), {"problems": problems})
    return Verdict("lint", Outcome.PASS, f"the backward repeats {counted(len(repeats), 'operator')}, from what the "
                                         "forward read", {"repeated": len(repeats)})


def _undone(known: Known) -> Verdict | None:
    for record in known.records:
        graphs = [g for g in (*record.before, *record.after) if isinstance(g, GraphModule)]
        if len(graphs) == 2 and facts_of(graphs[0]).part == "step":
            was, now = ({n.name for n in g.graph.nodes if AGAIN in n.meta and is_compute(n)} for g in graphs)
            if lost := sorted(was - now):
                text = (f"pass {record.name!r} dropped {counted(len(lost), 'product or attention')} that the backward "
                        f"repeats ({lost[0]} first), and so keeps the forward's values: leave nodes whose metadata "
                        f"has {AGAIN!r}")
                return Verdict("lint", Outcome.FAIL, text, {"lost": lost})
    return None


def _not_placed(joint: GraphModule, backward: GraphModule) -> list[str]:
    """Values that the backward gets from the forward, and should compute again."""
    again = {n.name for n in recomputed(aot.clone(joint))}
    return [f"{n.name} is tagged to be computed again, and the backward gets it from the forward"
            for n in backward.graph.find_nodes(op="placeholder") if n.name in again]


def _other_inputs(joint: GraphModule, repeats: list[Node]) -> list[str]:
    """Repeated nodes that are no repetition: another operator, other arguments, or other inputs."""
    was, problems = {n.name: n for n in joint.graph.nodes}, []
    for node in repeats:
        first = was[node.meta[AGAIN]]
        if node.target != first.target or str((node.args, node.kwargs)) != str((first.args, first.kwargs)):
            problems.append(f"{node.name} is repeated as {op_name(node.target)}{node.args}, and the forward computes "
                            f"{op_name(first.target)}{first.args}")
    return problems


def _overwritten(joint: GraphModule, repeats: list[Node]) -> list[str]:
    """Repeated nodes that read memory which the forward has written, or freed, since it read it."""
    owner, nodes = roots(joint), {n.name: n for n in joint.graph.nodes}
    written = {owner[value]: node for node in joint.graph.nodes if node.op == "call_function" and not is_backward(node)
               for value in (*written_inputs(node), *freed_inputs(node))}
    names = partitioning.written_names(joint)
    problems = []
    for node in repeats:
        first = nodes[node.meta[AGAIN]]
        for read in first.all_input_nodes:
            root = owner[read]
            if root in written and written[root] > first:
                how = "freed" if freed_inputs(written[root]) else "overwritten"
                problems.append(f"{node.name} is repeated from {read.name}, which {written[root].name} has {how}")
            elif aot.parameter_of(root) in names and root.op == "placeholder":
                problems.append(f"{node.name} is repeated from {aot.parameter_of(root)}, which the forward has written")
    return problems
