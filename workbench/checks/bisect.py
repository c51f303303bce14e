"""The first pass of a run that breaks its contract, and the first node in its graphs that does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.checks.collectives import gathered
from workbench.checks.matching import Matching, arguments, gap
from workbench.checks.numerics import bound_of, coarsest
from workbench.checks.record import PassRecord
from workbench.checks.values import Key, Trace, Value
from workbench.checks.verdicts import SEVERITY, Outcome
from workbench.graph.read.memory import live_bytes, saved_tensors
from workbench.graph.read.nodes import described, provenance
from workbench.graph.read.program import node_record

CHECKS = ("all", "numerics", "memory", "no_effect")


@dataclass(frozen=True)
class Place:
    """One node of one graph. text: its operator and arguments, as in the graph; result: dtype and shape."""

    graph: str
    name: str
    operator: str
    text: str
    result: str
    module: str
    source: str

    def __str__(self) -> str:
        return f"{self.text}, {self.result}\n{'':<9}{self.module or 'no module'}; {self.source or 'no source line'}"


def place_of(part: str, node: Node) -> Place:
    """A node's facts from the graph; `part` is joint, forward or backward."""
    record, where = node_record(node), provenance(node)
    source = f"{where.place}: {where.text}" + (" (backward)" if where.backward else "") if where.file else ""
    return Place(part, node.name, record.target if node.op == "call_function" else node.op, str(record),
                 described(node.meta.get("val")), where.module, source)


@dataclass(frozen=True)
class Found:
    """The first place where a check fails.

    record: the pass. problem: of the whole pass, one line. before, after: the node in the graph that the pass received
    and in the graph that it made; None where there is none. difference: between the two, one line. relative: the
    norm-relative difference; largest: the largest difference of one element; inf for different shapes or NaN.
    changed: what changed in the node. new: nodes that the pass added and from which the node's value comes. ranks:
    those on which the check fails here.
    """

    record: str
    problem: str
    before: Place | None = None
    after: Place | None = None
    difference: str = ""
    relative: float = 0.0
    largest: float = 0.0
    changed: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def key(self) -> Key | None:
        """(graph, name) of the node in the graph that the pass made."""
        return (self.after.graph, self.after.name) if self.after else None


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`: `found` is None where all of `passes` keep their contracts.

    unchecked: by pass, why it was not checked. covered: the verdicts that were checked.
    """

    recipe: str
    world: str
    check: str
    passes: tuple[str, ...]
    found: Found | None
    unchecked: dict[str, str]
    covered: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.found is None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; None for a difference that is no finite number."""
        data = {"ok": self.ok, **asdict(self)}
        if self.found is not None:
            data["found"] |= {k: None for k in ("relative", "largest") if not isfinite(getattr(self.found, k))}
        return data

    def __repr__(self) -> str:
        lines = [f"bisect {self.check}: {self.recipe} on {self.world}; passes {', '.join(self.passes)}"]
        lines += _told(self.found, self.passes) if self.found else [f"nothing found: {_HELD[self.check]}"]
        lines += [f"covered: {', '.join(self.covered)}"] if self.covered else []
        return "\n".join(lines + [f"not checked: pass {name!r}: {why}" for name, why in self.unchecked.items()])


_HELD = {"all": "no verdict fails, and every pass had its effect", "numerics": "every pass keeps its contract",
         "no_effect": "every pass had its effect", "memory": "no pass raises the estimated memory"}


def _told(found: Found, passes: Sequence[str]) -> list[str]:
    lines = [f"first pass: {found.record!r}, {passes.index(found.record) + 1} of {len(passes)}: {found.problem}"]
    node = found.after or found.before
    if node is None:
        return lines
    ranks = f"on {'rank' if len(found.ranks) == 1 else 'ranks'} {', '.join(map(str, found.ranks))}"
    lines.append(f"first node: {node.name} ({node.operator}) of the {node.graph} graph, {ranks}: {found.difference}")
    lines += [f"  {side:<7}{place}" for side, place in (("before", found.before), ("after", found.after)) if place]
    lines += [f"  changed: {text}" for text in found.changed]
    return lines + ([f"  computed from nodes that the pass added: {', '.join(found.new)}"] if found.new else [])


def first_told(
    records: Sequence[PassRecord], outcomes: Collection[Outcome] = (Outcome.FAIL, Outcome.NO_EFFECT),
    expected: Sequence[str] = (),
) -> Found | None:
    """The first pass with a verdict of these outcomes, and its message; passes in `expected` may have no effect."""
    for record in records:
        told = [v for v in record.verdicts if v.outcome in outcomes
                and not (record.name in expected and v.outcome is Outcome.NO_EFFECT)]
        if told:
            gravest = min(told, key=lambda v: SEVERITY.index(v.outcome))
            what = f"{gravest.check} FAIL" if gravest.outcome is Outcome.FAIL else gravest.outcome
            return Found(record.name, f"{what}: {gravest.message}")
    return None


def first_growth(records: Sequence[PassRecord]) -> Found | None:
    """The first pass that raises an estimate of memory, and the node that holds most of the added bytes."""
    for record in records:
        if record.memory is None:
            continue
        was, now = record.memory
        grown = next((key for key in was if now.get(key, 0) > was[key]), None)
        if grown is not None:
            what = "saved" if grown == "saved" else f"at the peak of the {grown.removeprefix('peak_')} graph"
            return _holder(record, grown, f"estimated bytes {what} rise from {was[grown]:,} to {now[grown]:,}")
    return None


def _holder(record: PassRecord, key: str, problem: str) -> Found:
    part = "forward" if key == "saved" else key.removeprefix("peak_")
    graphs = [pair[record.parts.index(part)] for pair in (record.before, record.after)]
    if key == "saved":
        sizes = [{r.root: r.held_bytes for r in saved_tensors(*pair) if r.held_bytes} for pair in
                 (record.before, record.after)]
    else:
        sizes = [{name: size for name, size, _ in live_bytes(g, len(g.graph.nodes)).holders} for g in graphs]
    more = {name: size - sizes[0].get(name, 0) for name, size in sizes[1].items()}
    name = max(more, key=lambda n: more[n])
    what = "is saved" if key == "saved" else "alive at the peak"
    now = f"{sizes[1][name]:,} bytes {what}, {sizes[0].get(name, 0):,} before"
    return Found(record.name, problem, _named(graphs[0], part, name), _named(graphs[1], part, name), now)


def _named(graph: GraphModule, part: str, name: str) -> Place | None:
    return next((place_of(part, n) for n in graph.graph.nodes if n.name == name), None)


def over_ranks(mine: Found | None, passes: Sequence[str]) -> Found | None:
    """The finding of the earliest pass on any rank, with all ranks that found it; every rank must call it."""
    every = {rank: found for rank, found in enumerate(gathered(mine)) if found is not None}
    if not every:
        return None
    first = min(every.values(), key=lambda f: passes.index(f.record))
    alike = [rank for rank, f in every.items() if (f.record, f.after) == (first.record, first.after)]
    return replace(first, ranks=tuple(alike))


def first_node(record: PassRecord, before: Trace, after: Trace | None, problem: str, group_size: int) -> Found:
    """The first node at which `after` breaks the contract of the pass, over all ranks; every rank must call it.

    `after` is None for compiled callables, which have no nodes: then the finding names the whole pass.
    """
    whole = Found(record.name, problem, ranks=tuple(range(len(gathered(None)))))
    if after is None:
        return whole
    contract = record.item.contract
    coarse = coarsest(before.outputs)

    def bound(a: torch.Tensor, b: torch.Tensor) -> float | None:
        return bound_of(contract, coarsest([a, b, torch.empty(0, dtype=coarse)]), group_size)

    if any(gathered(after.raised is not None)):
        mine = _raised(whole, before, after)
        suspects: set[Key] = {after.raised[0]} if after.raised else set()
    else:
        matching = Matching(before, after, bound)
        ordered = matching.suspects()
        suspects = set(ordered)
        mine = _suspect(whole, matching, ordered)
    every: list[Local] = gathered(mine)
    candidates = [(place, rank) for rank, (place, _) in enumerate(every) if place is not None]
    if not candidates:
        return replace(whole, difference="the same graphs, run node by node, gave no difference")
    first = every[min(candidates)[1]][1]
    assert first is not None and first.key is not None
    key = first.key
    here = gathered(key in suspects or (mine[1] is not None and mine[1].key == key))
    alike = [found for _, found in every if found is not None and found.key == key]
    worst = max(alike, key=lambda f: f.relative)
    return replace(worst, ranks=tuple(rank for rank, is_so in enumerate(here) if is_so))


Local = tuple[tuple[int, int, bool, int] | None, Found | None]


def _raised(whole: Found, before: Trace, after: Trace) -> Local:
    if after.raised is None:
        return None, None
    key, why = after.raised
    value, twin = after.values[key], before.values.get(key)
    was = place_of(key[0], twin.node) if twin is not None else None
    return value.place, replace(whole, before=was, after=place_of(key[0], value.node), difference=why, relative=inf,
                                largest=inf, changed=_changed(twin, value, {}) if twin else ())


def _suspect(whole: Found, matching: Matching, suspects: list[Key]) -> Local:
    """This rank's first wrong node; where all nodes are right and another one is returned, the first wrong output."""
    before, after = matching.before, matching.after
    found = matching.first(suspects)
    if found is None:
        return _wrong_output(whole, matching)
    key, value, twin = found[0], after.values[found[0]], before.values[found[1]]
    apart = gap(twin, value, matching.bound)
    names = {now[1]: was[1] for now, was in matching.same.items() if now[0] == key[0]}
    return value.place, replace(
        whole, before=place_of(twin.key[0], twin.node), after=place_of(key[0], value.node),
        difference=(apart.problem or "no value before to compare with") + f", largest {apart.largest:.1e}",
        relative=apart.relative, largest=apart.largest,
        changed=_changed(twin, value, names) if twin.node.name == value.node.name else
        (f"{value.node.name} stands where {twin.node.name} stood",),
        new=tuple(name for _, name in matching.new_before(key, suspects)))


def _wrong_output(whole: Found, matching: Matching) -> Local:
    before, after = matching.before, matching.after
    for i in matching.wrong_outputs():
        keys = before.producers[i], after.producers[i]
        if keys[0] is None or keys[1] is None:
            continue
        was, now = before.values[keys[0]], after.values[keys[1]]
        apart = gap(was, now, matching.bound)
        text = f"output {i}: {apart.problem or 'another node is returned'}, largest {apart.largest:.1e}"
        return (now.place[0], int(1e9), True, i), replace(
            whole, before=place_of(keys[0][0], was.node), after=place_of(keys[1][0], now.node), difference=text,
            relative=apart.relative, largest=apart.largest,
            changed=(f"output {i} was {was.node.name} and is {now.node.name}",) if was.key != now.key else ())
    return None, None


def _changed(before: Value, after: Value, names: dict[str, str]) -> tuple[str, ...]:
    """What differs between a node before and after; `names` maps the new names of renamed nodes to the old ones."""
    was, now, found = before.node, after.node, []
    if now.op == "placeholder" and before.reads != after.reads:
        found.append(f"was given {before.reads[0][1]} of the forward, and is given {after.reads[0][1]}")
    if node_record(was).target != node_record(now).target:
        found.append(f"operator was {node_record(was).target} and is {node_record(now).target}")
    old, new = arguments(was), arguments(now)
    if len(old) != len(new):
        found.append(f"had {len(old)} arguments and has {len(new)}")
    left = {n.name for n in now.graph.nodes}
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        a_name, b_name = (v.name if isinstance(v, Node) else repr(v) for v in (a, b))
        if a_name != b_name and not (isinstance(b, Node) and names.get(b_name) == a_name):
            gone = ", which is gone" if isinstance(a, Node) and a_name not in left else ""
            found.append(f"argument {i} was {a_name}{gone}, and is {b_name}")
    return tuple(found)
