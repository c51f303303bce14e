"""Whether the ranks move the same bytes as before the pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import Any

from torch.fx import GraphModule, Node

from workbench.checks.operands import digests
from workbench.checks.snapshot import snapshot
from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import reading
from workbench.graph.read.collectives import Collective
from workbench.passes.registry import Graphs, RegisteredPass
from workbench.recipe.wording import counted, differing
from workbench.torch_api.ops import COMPILED_REGION, group_ranks, short_name

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
    if hidden := hidden_launches(after):
        return Verdict("collectives", Outcome.UNKNOWN, hidden)
    was, now = collectives_of(before), collectives_of(after)
    if item.promised is None:
        again = repeated(before, after) if item.contract.repeats else []
        kept = conserved(was, [c for c in now if c not in again], fewer=item.contract.fewer_bytes)
        if again:
            size = moved_bytes(again)[0].total()
            return replace(kept, message=f"{kept.message}, and {size:,} bytes repeated in {len(again)}")
        return kept
    promised = item.promised(before, options)
    kept = conserved(promised, now, same_launches=True)
    bytes_before, bytes_after = (moved_bytes(side)[0].total() for side in (was, now))
    text = f"{bytes_before:,} bytes before, {bytes_after:,} after, as promised"
    if kept.outcome is Outcome.FAIL:
        text = f"against what the pass promised: {kept.message}"
    return Verdict("collectives", kept.outcome, text, kept.evidence)


def hidden_launches(graphs: Iterable[GraphModule]) -> str:
    """Why the collectives of these graphs cannot all be read, as where Inductor compiled a graph; "" where they can."""
    calls = (node for graph in graphs for node in graph.graph.nodes if _calls_function(node))
    names = ", ".join(dict.fromkeys(map(short_name, calls)))
    return f"{names} calls other functions than operators, and what it sends cannot be read" if names else ""


def _calls_function(node: Node) -> bool:
    """Whether a node calls a Python function, as what Inductor compiled is, whose operators no graph shows."""
    function = isinstance(node.target, FunctionType) and node.target.__module__ != "torch"
    return function and COMPILED_REGION not in node.meta


def repeated(before: Graphs, after: Graphs) -> list[Collective]:
    """The collectives of `after` that send once more, over the same ranks, what one of `before` sends."""
    left = Counter(_sent(before))
    known, again = set(left), []
    for collective, sent in zip(collectives_of(after), _sent(after), strict=True):
        left[sent] -= 1
        if sent in known and left[sent] < 0:
            again.append(collective)
    return again


def _sent(graphs: Graphs) -> Iterator[tuple[Any, ...]]:
    """What each collective sends over which ranks, in order."""
    digest_of = digests(graphs)
    for graph in graphs:
        nodes = {node.name: node for node in graph.graph.nodes}
        for collective in reading(snapshot, graph).collectives:
            yield *_key(collective), digest_of[nodes[collective.node]]


def collectives_of(graphs: Iterable[GraphModule]) -> list[Collective]:
    """The collectives of finished graphs, in order."""
    return [c for graph in graphs for c in reading(snapshot, graph).collectives]
