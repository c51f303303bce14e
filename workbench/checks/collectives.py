"""Whether the ranks move the same bytes as before the pass, and whether they agree on the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.fx import GraphModule

from workbench.checks.operands import described, digests
from workbench.checks.snapshot import snapshot
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import facts_of, reading
from workbench.graph.read.collectives import Collective, Groups, list_collectives
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.recipe.wording import counted, differing
from workbench.torch_api.ops import group_ranks, world_kind
from workbench.world.mesh import all_gather_object as all_gather_object

Moved = Counter[tuple[str, str, str]]


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


def moved_bytes(collectives: Iterable[Collective]) -> tuple[Moved, Moved]:
    """(bytes, launches) by (kind, mesh axis or ranks, reduction).

    Bytes of the unsharded side: an all-gather's output, otherwise the input.
    """
    moved, launches = Moved(), Moved()
    for c in collectives:
        moved[_key(c)] += c.payload
        launches[_key(c)] += 1
    return moved, launches


def _key(c: Collective) -> tuple[str, str, str]:
    """A second process group over the same ranks counts as one."""
    over = c.axis
    if over is None:
        ranks = group_ranks(c.group)
        over = f"ranks {list(ranks)}" if ranks else f"group {c.group}"
    return c.kind, over, c.reduce_op or ""


def conserved(before: Iterable[Collective], after: Iterable[Collective], *, fewer: bool = False,
              same_launches: bool = False) -> Verdict:
    """PASS if each kind of collective moves the same bytes over each axis as before; launches may differ.

    All-to-alls must also keep their number of launches: their sizes may be known only in a step, and no pass may merge
    or drop one. fewer: the pass declares that it removes bytes; it may still not add any. same_launches: of all kinds.
    """
    before, after = list(before), list(after)
    (was, launched), (now, launches) = moved_bytes(before), moved_bytes(after)
    rows, wrong = {}, []
    for key in sorted(was.keys() | now.keys()):
        name = " ".join(filter(None, key))
        rows[name] = {"bytes_before": was[key], "bytes_after": now[key], "launches_before": launched[key],
                      "launches_after": launches[key]}
        problems = []
        if was[key] != now[key] and not (fewer and now[key] < was[key]):
            problems.append(f"{was[key]:,} bytes before, {now[key]:,} after")
        if (same_launches or key[0] == "all_to_all") and launched[key] != launches[key]:
            problems.append(f"{launched[key]} launches before, {launches[key]} after")
        for problem in problems:
            wrong.append(f"{name}: {problem}{differing(_nodes(before, key), _nodes(after, key))}")
    if wrong:
        return Verdict("collectives", Outcome.FAIL, "; ".join(wrong), rows)
    if not rows:
        return Verdict("collectives", Outcome.PASS, "no collectives, before or after")
    lost = was.total() - now.total()
    kept = f"{was.total():,} bytes conserved"
    if lost:
        kept = f"{lost:,} of {was.total():,} bytes taken out, the rest"
    text = f"{kept} in {counted(launches.total(), 'launch')} (before: {launched.total()})"
    return Verdict("collectives", Outcome.PASS, text, rows)


def _nodes(collectives: Iterable[Collective], key: tuple[str, str, str]) -> list[str]:
    return [f"{c.node} of {c.payload:,} bytes" for c in collectives if _key(c) == key]


def of_pass(item: RegisteredPass, before: Graphs, after: Graphs, options: Any) -> Verdict:
    """Whether the graphs that a pass made move what it received, or what it promised, in as many launches."""
    was, now = collectives_of(before), collectives_of(after)
    if item.promised is None:
        return conserved(was, now, fewer=item.contract.fewer_bytes)
    promised = item.promised(before, options)
    kept = conserved(promised, now, same_launches=True)
    bytes_before, bytes_after = (moved_bytes(side)[0].total() for side in (was, now))
    text = f"{bytes_before:,} bytes before, {bytes_after:,} after, as promised"
    if kept.outcome is Outcome.FAIL:
        text = f"against what the pass promised: {kept.message}"
    return Verdict("collectives", kept.outcome, text, kept.evidence)


def collectives_of(graphs: Iterable[GraphModule]) -> list[Collective]:
    """The collectives of finished graphs, in order."""
    return [c for graph in graphs for c in reading(snapshot, graph).collectives]


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
            node = nodes[c.node]
            what = described(node), sent[node]
            launch = c.op, over, c.reduce_op or "", c.shape, c.dtype, c.group_size
            entries.append(Entry(*launch, *what))
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
        if len(set(at)) > 1:
            common = Counter(at).most_common(1)[0][0]
            odd = next(r for r, entry in enumerate(at) if entry != common)
            one, other = _shown(at[odd], common), _shown(common, at[odd])
            return odd, i, (f"rank {names[odd]} would run {one} as collective {i + 1}, "
                            f"where rank {names[at.index(common)]} runs {other}: "
                            "the ranks would hang, fail or compute wrong values")
    return None


def exchange(graphs: Sequence[GraphModule]) -> Verdict:
    """Compare the ordered collectives of all ranks; call it on every rank before the graphs run.

    Every rank gets the same verdict; UNKNOWN without other ranks. `runs` in the evidence of a FAIL: the launches match,
    so that nothing hangs, and what they send does not.
    """
    kind = world_kind()
    if kind is None or kind == "fake" or dist.get_world_size() == 1:
        alone = {None: "one process", "fake": "a fake world"}.get(kind, "one rank")
        return Verdict("collectives", Outcome.UNKNOWN, f"{alone} has no other rank to compare the order with")
    lists = all_gather_object(schedule(graphs))
    odd = difference(lists)
    if odd is not None:
        rank, index, sentence = odd
        launches = {tuple(entry.launch for entry in entries) for entries in lists}
        evidence = {"rank": rank, "index": index, "runs": len(launches) == 1}
        return Verdict("collectives", Outcome.FAIL, sentence, evidence)
    text = f"{len(lists[0])} collectives in the same order on {len(lists)} ranks"
    return Verdict("collectives", Outcome.PASS, text, {"collectives": len(lists[0])})
