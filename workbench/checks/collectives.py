"""Whether the ranks move the same bytes as before the pass, and whether they agree on the order."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch.fx import GraphModule

from workbench.checks.snapshot import snapshot
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import facts_of, reading
from workbench.graph.read.collectives import Collective, Groups, list_collectives
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.recipe.wording import counted, differing
from workbench.torch_api.ops import group_ranks, world_kind

Entry = tuple[str, str, str, tuple[int, ...], str, int]
Moved = Counter[tuple[str, str, str]]


def gathered(value: Any) -> list[Any]:
    """The value of every rank, in rank order; this process's alone without other ranks. Every rank must call it."""
    if world_kind() in (None, "fake"):
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _over(c: Collective) -> str:
    """The ranks that a collective runs over, by name: a second process group over the same ranks counts as one."""
    if c.axis:
        return c.axis
    ranks = group_ranks(c.group)
    return f"ranks {list(ranks)}" if ranks else f"group {c.group}"


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
    return c.kind, _over(c), c.reduce_op or ""


def _told(before: Iterable[Collective], after: Iterable[Collective]) -> dict[str, str]:
    """By what `conserved` names a row by: the nodes that only one side has, or that move another number of bytes."""
    sides: list[dict[tuple[str, str, str], list[str]]] = [{}, {}]
    for side, collectives in zip(sides, (before, after), strict=True):
        for c in collectives:
            side.setdefault(_key(c), []).append(f"{c.node} of {c.payload:,} bytes")
    was, now = sides
    return {
        " ".join(filter(None, k)): differing(was.get(k, []), now.get(k, []))
        for k in was.keys() | now.keys()
    }


def conserved(before: Iterable[Collective], after: Iterable[Collective], *, fewer: bool) -> Verdict:
    """PASS if each kind of collective moves the same bytes over each axis as before; launches may differ.

    All-to-alls must also keep their number of launches: their sizes may be known only in a step, and no pass may merge
    or drop one. fewer: the pass declares that it removes bytes; it may still not add any.
    """
    before, after = list(before), list(after)
    (was, launched), (now, launches) = moved_bytes(before), moved_bytes(after)
    rows = {" ".join(filter(None, k)): {"bytes_before": was[k], "bytes_after": now[k], "launches_before": launched[k],
                                        "launches_after": launches[k]} for k in sorted(was.keys() | now.keys())}
    wrong = [(name, f"{row['bytes_before']:,} bytes before, {row['bytes_after']:,} after")
             for name, row in rows.items() if row["bytes_before"] != row["bytes_after"]
             and not (fewer and row["bytes_after"] < row["bytes_before"])]
    wrong += [(name, f"{row['launches_before']} launches before, {row['launches_after']} after")
              for name, row in rows.items()
              if name.startswith("all_to_all") and row["launches_before"] != row["launches_after"]]
    if wrong:
        told = _told(before, after)
        text = "; ".join(f"{name}: {said}{told[name]}" for name, said in wrong)
        return Verdict("collectives", Outcome.FAIL, text, rows)
    old, new = sum(launched.values()), sum(launches.values())
    whole, lost = sum(was.values()), sum(was.values()) - sum(now.values())
    kept = (
        f"{lost:,} of {whole:,} bytes taken out, the rest" if lost else f"{whole:,} bytes conserved"
    )
    text = f"{kept} in {counted(new, 'launch')} (before: {old})"
    return Verdict(
        "collectives", Outcome.PASS, text if rows else "no collectives, before or after", rows
    )


def kept_promise(
    before: Iterable[Collective], promised: Iterable[Collective], after: Iterable[Collective]
) -> Verdict:
    """PASS if `after` moves the bytes of `promised`, in as many launches; the message compares with `before`."""
    promised = list(promised)
    found = conserved(promised, after, fewer=False)
    wrong = [
        f"{name}: {row['launches_before']} launches promised, {row['launches_after']} found"
        for name, row in found.evidence.items()
        if row["launches_before"] != row["launches_after"]
    ]
    if found.outcome is Outcome.FAIL or wrong:
        told = (
            found.message.replace(" bytes before", " bytes promised")
            if found.outcome is Outcome.FAIL
            else ""
        )
        return Verdict(
            "collectives", Outcome.FAIL, "; ".join(filter(None, (told, *wrong))), found.evidence
        )
    was, now = (sum(c.payload for c in each) for each in (before, promised))
    return Verdict(
        "collectives",
        Outcome.PASS,
        f"{was:,} bytes before, {now:,} after, as promised",
        found.evidence,
    )


def of_pass(item: RegisteredPass, before: Graphs, after: Graphs, options: Any) -> Verdict:
    """Whether the graphs that a pass made move what it received, or what it promised."""
    was, now = collectives_of(before), collectives_of(after)
    if item.promised is None:
        return conserved(was, now, fewer=item.contract.fewer_bytes)
    return kept_promise(was, item.promised(before, options), now)


def collectives_of(graphs: Iterable[GraphModule]) -> list[Collective]:
    """The collectives of finished graphs, in order."""
    return [c for graph in graphs for c in reading(snapshot, graph).collectives]


def schedule(graphs: Iterable[GraphModule]) -> list[Entry]:
    """The ordered list that all ranks must share: (operator, axis, reduction, shape, dtype, group size).

    Ranks of one program run over different groups of the same axis, so the axis names the group. A second process
    group of an axis gets a number, in the order of the groups' names in the graph's facts.
    """
    entries: list[Entry] = []
    for graph in graphs:
        numbers: dict[str, dict[str, int]] = {}
        groups = Groups(facts_of(graph))
        for name in groups.names():
            twins = numbers.setdefault(groups.axis(name) or "", {})
            twins.setdefault(name, len(twins))
        for c in list_collectives(graph):
            twins = numbers.setdefault(c.axis or "", {})
            number = twins.setdefault(c.group, len(twins))
            over = (c.axis or "group") + (f"#{number}" if number else "")
            entries.append((c.op, over, c.reduce_op or "", c.shape, c.dtype, c.group_size))
    return entries


def schedule_hash(entries: Iterable[Entry]) -> str:
    """SHA-256 of the ordered list, in hex."""
    return hashlib.sha256(json.dumps(list(entries)).encode()).hexdigest()


def _shown(entry: Any) -> str:
    if entry is None:
        return "nothing more"
    op, over, reduction, shape, dtype, size = entry
    return f"{op} {dtype}{list(shape)} {reduction + ' ' if reduction else ''}over {over}({size})"


def difference(
    lists: Sequence[Sequence[Entry]], ranks: Sequence[int] | None = None
) -> tuple[int, int, str] | None:
    """(list, index, sentence) of the first entry that differs from the one of most lists, or None.

    ranks: the rank of each list; by default 0, 1 and so on.
    """
    names = range(len(lists)) if ranks is None else ranks
    for i in range(max(map(len, lists), default=0)):
        at = [tuple(entries[i]) if i < len(entries) else None for entries in lists]
        if len(set(at)) > 1:
            common = Counter(at).most_common(1)[0][0]
            odd = next(r for r, entry in enumerate(at) if entry != common)
            return odd, i, (f"rank {names[odd]} would run {_shown(at[odd])} as collective {i + 1}, "
                            f"where rank {names[at.index(common)]} runs {_shown(common)}: "
                            "the ranks would hang, fail or compute wrong values")
    return None


def exchange(graphs: Iterable[GraphModule]) -> Verdict:
    """Compare the ordered collectives of all ranks; call it on every rank before the graphs run.

    The ranks exchange hashes, and whole lists only if those differ; every rank gets the same verdict. UNKNOWN
    without other ranks.
    """
    kind = world_kind()
    if kind is None or kind == "fake" or dist.get_world_size() == 1:
        why = "one process" if kind is None else "a fake world" if kind == "fake" else "one rank"
        return Verdict(
            "collectives", Outcome.UNKNOWN, f"{why} has no other rank to compare the order with"
        )
    entries = schedule(graphs)
    hashes = gathered(schedule_hash(entries))
    if len(set(hashes)) == 1:
        text = f"{len(entries)} collectives in the same order on {len(hashes)} ranks"
        return Verdict(
            "collectives", Outcome.PASS, text, {"hash": hashes[0], "collectives": len(entries)}
        )
    found = difference(gathered(entries))
    rank, index, sentence = found or (0, 0, "the hashes differ, the lists do not")
    return Verdict(
        "collectives", Outcome.FAIL, sentence, {"rank": rank, "index": index, "hashes": hashes}
    )
