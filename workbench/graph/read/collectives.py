"""The collectives of a graph, in node order: what moves, over which mesh axis, and what could hide it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from workbench.graph.facts import GraphFacts, facts_of
from workbench.graph.read.nodes import is_compute, module_path
from workbench.torch_api.ops import (
    aliased_inputs,
    argument,
    blocks,
    calls_of,
    collective_kind,
    group_name_of,
    group_ranks,
    hint,
    is_wait,
    op_name,
    tensor_bytes,
    written_inputs,
)


@dataclass(frozen=True)
class Collective:
    """One launch. `shape` and `dtype` are the first input's; `bytes_in`, `bytes_out` are of this rank.

    `axis` is the mesh axis, or None if the graph's facts do not name the group.
    `waits` are the nodes that wait for it: several for a coalesced launch, itself where the operator returns when it
    has ended, none if the wait is missing.
    """

    kind: str
    op: str
    reduce_op: str | None
    group: str
    group_size: int
    axis: str | None
    shape: tuple[int, ...]
    dtype: str
    bytes_in: int
    bytes_out: int
    node: str
    waits: tuple[str, ...]
    module: str

    @property
    def wait(self) -> str | None:
        return self.waits[0] if self.waits else None

    @property
    def payload(self) -> int:
        """Bytes that bucketing must conserve: the unsharded side (all-gather's output, otherwise the input)."""
        return self.bytes_out if self.kind == "all_gather" else self.bytes_in

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        over = f"{self.axis or self.group}({self.group_size})"
        return f"{self.kind} {self.dtype}{list(self.shape)} over {over}, {self.payload} B, {self.node}{where}"


class Groups:
    """Process-group names to mesh axes and sizes, from a graph's facts and from the process.

    A second process group over the same ranks (a gather group of its own) counts as the same axis.
    """

    def __init__(self, facts: GraphFacts):
        # "dp_shard.gather" is the second group of the axis dp_shard.
        self._axes: dict[str, str] = {name: axis.split(".")[0] for axis, name in facts.groups.items()}
        self._sizes: Mapping[str, int] = facts.group_sizes
        self._ranks: dict[str, tuple[int, ...] | None] = {}

    def names(self) -> list[str]:
        """The groups that the facts name, in the order in which their axes were named."""
        return list(self._axes)

    def ranks(self, name: str) -> tuple[int, ...] | None:
        if name not in self._ranks:
            self._ranks[name] = group_ranks(name)
        return self._ranks[name]

    def axis(self, name: str) -> str | None:
        if name in self._axes:
            return self._axes[name]
        ranks = self.ranks(name)
        if ranks is None:
            return None
        return next((axis for other, axis in list(self._axes.items()) if self.ranks(other) == ranks), None)

    def size(self, name: str) -> int:
        return self._sizes.get(name) or len(self.ranks(name) or ())


def axis_names(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Process groups' names to axes; a second group of an axis keeps its own name, `dp_shard.gather`."""
    return {name: axis for axis, name in facts_of(gm).groups.items()}


def waits_of(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The waits that a collective's result reaches through views and items of a list; itself where it blocks."""
    if blocks(start.target):
        return [start]
    return [node for node in readers_of(start) if node.op == "call_function" and is_wait(node.target)]


def readers_of(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that read or write a collective's result, also through views and items of a list: its waits, and
    those that do not wait for it.
    """
    found, todo, seen = [], [start], {start}
    while todo:
        node = todo.pop(0)
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            shares = (user.op == "call_function" and not is_wait(user.target)
                      and collective_kind(user.target) is None and node in aliased_inputs(user))
            if shares:
                todo.append(user)
            if not shares or written_inputs(user):
                found.append(user)
    return found


def _collective(node: torch.fx.Node, kind: str, groups: Groups) -> Collective:
    first = node.args[0] if node.args else next(iter(node.kwargs.values()))
    inputs = [n.meta.get("val") for n in (first if isinstance(first, list | tuple) else [first])
              if isinstance(n, torch.fx.Node)]
    value = inputs[0] if inputs else None
    group = group_name_of(node)
    size = argument(node, "group_size")  # None for an operator that has no such argument
    reduce_op = argument(node, "reduce_op") if kind in ("all_reduce", "reduce_scatter") else None
    return Collective(
        kind, op_name(node.target), reduce_op, group, size if isinstance(size, int) else groups.size(group),
        groups.axis(group),
        tuple(hint(s) for s in value.shape) if isinstance(value, torch.Tensor) else (),
        str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "?",
        sum(map(tensor_bytes, inputs)), tensor_bytes(node.meta.get("val")),
        node.name, tuple(w.name for w in waits_of(node)), module_path(node),
    )


def list_collectives(gm: torch.fx.GraphModule) -> list[Collective]:
    """Every functional collective of the graph, in node order, bucketed and coalesced launches included."""
    groups = Groups(facts_of(gm))
    starts = [(n, collective_kind(n.target)) for n in calls_of(gm.graph, lambda t: collective_kind(t) is not None)]
    return [_collective(node, kind, groups) for node, kind in starts if kind is not None]


def launches(collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Number of launches by (kind, axis; the group's name where the axis is unknown)."""
    return dict(Counter((c.kind, c.axis or c.group) for c in collectives))


def payload_bytes(collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Bytes by (kind, axis; the group's name where the axis is unknown): see `Collective.payload`."""
    total: Counter[tuple[str, str]] = Counter()
    for c in collectives:
        total[c.kind, c.axis or c.group] += c.payload
    return dict(total)


def exposed_in_node_order(
    gm: torch.fx.GraphModule, collectives: Sequence[Collective] | None = None
) -> list[Collective]:
    """Collectives with no matmul and no attention between start and first wait: nothing can hide them.

    Order alone: whether what stands between is long enough is the cost model's question.
    """
    before: dict[str, int] = {}
    compute = 0
    for node in gm.graph.nodes:
        before[node.name] = compute
        compute += is_compute(node)
    found = list_collectives(gm) if collectives is None else collectives
    return [c for c in found if not c.waits or min(before[w] for w in c.waits) == before[c.node]]
