"""Whether the ranks move the same bytes as before the pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule

from workbench.checks.snapshot import snapshot
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import reading
from workbench.graph.read.collectives import Collective
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.recipe.wording import counted, differing
from workbench.torch_api.ops import group_ranks

Moved = Counter[tuple[str, str, str]]


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
