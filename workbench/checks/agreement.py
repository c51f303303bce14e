"""Whether all ranks run the same collectives in one order, and compute alike what they send and return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.fx import GraphModule

from workbench.checks.collectives import hidden_launches
from workbench.checks.operands import digests, gradient_digests, operand_name
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.partition import Partitioned
from workbench.graph.read.collectives import Groups, list_collectives
from workbench.torch_api.ops import world_kind
from workbench.world.mesh import all_gather_object


class Entry(NamedTuple):
    """One launch, as all ranks must have it. over: the mesh axis. sends, digest: see `operands`."""

    op: str
    over: str
    reduction: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    sends: str = ""
    digest: str = ""

    @property
    def launch(self) -> tuple[Any, ...]:
        """All but what is sent: ranks whose launches match do not hang."""
        return self[:-2]


def schedule(graphs: Sequence[GraphModule]) -> list[Entry]:
    """The ordered list that all ranks must share.

    Ranks of one program run over different groups of the same axis, so the axis names the group. A second process
    group of an axis gets a number, in the order of the groups' names in the graph's facts.
    """
    entries: list[Entry] = []
    sent = digests(graphs)
    for graph in graphs:
        nodes = {node.name: node for node in graph.graph.nodes}
        groups, listed = Groups(facts_of(graph)), list_collectives(graph)
        twins: dict[str, list[str]] = {}
        for name in dict.fromkeys([*groups.names(), *(c.group for c in listed)]):
            twins.setdefault(groups.axis(name) or "", []).append(name)
        for c in listed:
            number = twins[c.axis or ""].index(c.group)
            over = (c.axis or "group") + (f"#{number}" if number else "")
            launch = c.op, over, c.reduce_op or "", c.shape, c.dtype, c.group_size
            entries.append(Entry(*launch, operand_name(nodes[c.node]), sent[nodes[c.node]]))
    return entries


def _shown(entry: Entry | None, other: Entry | None) -> str:
    """A launch in words; what it sends only where the rest is as in the other."""
    if entry is None:
        return "nothing more"
    sent = f"{entry.dtype}{list(entry.shape)}"
    parts = entry.op, sent, entry.reduction, f"over {entry.over}({entry.size})"
    text = " ".join(filter(None, parts))
    if other is None or entry.launch != other.launch:
        return text
    otherwise = ", computed otherwise" if entry.sends == other.sends else ""
    return f"{text} of {entry.sends}{otherwise}"


def difference(
    lists: Sequence[Sequence[Entry]], ranks: Sequence[int] | None = None
) -> tuple[int, int, str] | None:
    """(list, index, sentence) of the first entry that differs from the one of most lists, or None.

    ranks: the rank of each list; by default 0, 1 and so on.
    """
    names = range(len(lists)) if ranks is None else ranks
    for i in range(max(map(len, lists), default=0)):
        at = [Entry(*entries[i]) if i < len(entries) else None for entries in lists]
        if pair := _odd_and_common(at):
            odd, common = pair
            one, other = _shown(at[odd], at[common]), _shown(at[common], at[odd])
            return odd, i, (f"rank {names[odd]} would run {one} as collective {i + 1}, "
                            f"where rank {names[common]} runs {other}: "
                            "the ranks would hang, fail or compute wrong values")
    return None


def _odd_and_common(values: list[Any]) -> tuple[int, int] | None:
    """The places of a value that is not the most common one, and of that; None where all are equal."""
    common = Counter(values).most_common(1)[0][0]
    odd = next((i for i, value in enumerate(values) if value != common), None)
    return None if odd is None else (odd, values.index(common))


def other_gradient(ranks: Sequence[Mapping[str, str]]) -> tuple[int, int | None, str] | None:
    """(rank, None, sentence) of the first gradient whose digest is another on that rank than on most, or None."""
    for name in ranks[0]:
        if pair := _odd_and_common([gradients.get(name) for gradients in ranks]):
            odd, common = pair
            text = f"rank {odd} computes the gradient of {name} otherwise than rank {common}"
            return odd, None, f"{text}: the values would be wrong"
    return None


def exchange(graphs: Sequence[GraphModule], broken: UnusableGraph | None = None) -> Verdict:
    """Compare all ranks' ordered collectives, and how they compute gradients; every rank calls it, before a run.

    Every rank gets the same verdict; UNKNOWN without other ranks. `runs` in the evidence of a FAIL: the launches match,
    so that nothing hangs, and what they send or return does not. broken: why this rank has no such graphs. Then every
    rank raises it.
    """
    kind = world_kind()
    if kind is None or kind == "fake" or dist.get_world_size() == 1:
        alone = {None: "one process", "fake": "a fake world"}.get(kind, "one rank")
        return Verdict("collectives", Outcome.UNKNOWN, f"{alone} has no other rank to compare the order with")
    answers = all_gather_object(
        broken or (schedule(graphs), gradient_digests(graphs), hidden_launches(graphs))
    )
    errors = {r: answer for r, answer in enumerate(answers) if isinstance(answer, UnusableGraph)}
    if error := next(iter(errors.values()), None):
        error.ranks = tuple(errors)
        raise error
    lists, gradients, hidden = zip(*answers, strict=True)
    odd = difference(lists) or other_gradient(gradients)
    if odd is not None:
        launches = {tuple(entry.launch for entry in entries) for entries in lists}
        evidence = {"rank": odd[0], "index": odd[1], "runs": len(launches) == 1}
        return Verdict("collectives", Outcome.FAIL, odd[2], evidence)
    if any(hidden):
        return Verdict("collectives", Outcome.UNKNOWN, next(filter(None, hidden)))
    text = f"{len(lists[0])} collectives in the same order on {len(lists)} ranks"
    return Verdict("collectives", Outcome.PASS, text, {"collectives": len(lists[0])})


def agree_on_collectives(pair: Partitioned) -> Verdict:
    """Compare the ordered collectives of all ranks, before any of them runs. Every rank must call it.

    A FAIL names the pass behind which the ranks differ, which its evidence has as `pass`, or "" there. Where the
    launches do not match, they would hang: raises UnusableGraph on every rank, or WorkbenchError without such a pass.
    """
    verdict = exchange(pair.graphs, pair.broken)
    if verdict.outcome is not Outcome.FAIL:
        return verdict
    passed = verdict.evidence["pass"] = _parting_pass(pair.known.records)
    if verdict.evidence["runs"]:
        behind = f"behind pass {passed!r}, " if passed else ""
        return replace(verdict, message=behind + verdict.message)
    if not passed:
        raise WorkbenchError(verdict.message)
    raise _other_launches(passed, verdict)


def require_same_launches(record: PassRecord) -> None:
    """Raise UnusableGraph where the ranks' graphs of a pass launch other collectives: to run them would hang.

    Every rank must call it, and raises it. Of a graph that is partitioned later, dead launches are not in the step.
    """
    verdict = exchange(record.after)
    if verdict.outcome is Outcome.FAIL and not verdict.evidence["runs"]:
        raise _other_launches(record.name, verdict)


def _other_launches(name: str, verdict: Verdict) -> UnusableGraph:
    return UnusableGraph(name, verdict.message, "collectives", (verdict.evidence["rank"],))


def _parting_pass(records: Sequence[PassRecord]) -> str:
    """The first pass that received graphs on which the ranks agree, and left others; "" without such a pass."""
    for record in records:
        sides = (record.before, record.after) if record.has_graphs else ()
        outcomes = [exchange(graphs).outcome for graphs in sides]
        if outcomes == [Outcome.PASS, Outcome.FAIL]:
            return record.name
    return ""
