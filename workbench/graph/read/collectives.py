"""The collectives of a graph in node order: bytes, mesh axis, and the compute that could hide them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

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
    host_copy,
    multiplies,
    op_name,
    tensor_bytes,
    waits,
    written_inputs,
)


@dataclass(frozen=True)
class Collective:
    """One launch. shape, dtype: of the first input. bytes_in, bytes_out: on this rank.

    axis: the mesh axis; None where the graph's facts do not name the group. waits: the nodes that wait for it. A
    coalesced launch has several, a blocking operator waits for itself, and a launch without a wait has none.
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
    def payload(self) -> int:
        """Bytes of the unsharded side, which bucketing conserves: an all-gather's output, else the input."""
        return self.bytes_out if self.kind == "all_gather" else self.bytes_in

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        over = f"{self.axis or self.group}({self.group_size})"
        return f"{self.kind} {self.dtype}{list(self.shape)} over {over}, {self.payload} B, {self.node}{where}"


class Groups:
    """Mesh axes and sizes of process groups by name, from a graph's facts and from the process.

    A second process group over the same ranks, such as one for all-gathers alone, belongs to the same axis.
    """

    def __init__(self, facts: GraphFacts):
        # "dp_shard.gather" is the second group of the axis dp_shard.
        self._axes = {name: axis.split(".")[0] for axis, name in facts.groups.items()}
        self._sizes = facts.group_sizes
        self._ranks = cache(group_ranks)

    def names(self) -> list[str]:
        """The groups that the facts name, in the order of the facts."""
        return list(self._axes)

    def axis(self, name: str) -> str | None:
        if name in self._axes or self._ranks(name) is None:
            return self._axes.get(name)
        same = (axis for other, axis in self._axes.items() if self._ranks(other) == self._ranks(name))
        return next(same, None)

    def size(self, name: str) -> int:
        return self._sizes.get(name) or len(self._ranks(name) or ())


def keep_axes(before: torch.fx.GraphModule, after: torch.fx.GraphModule) -> None:
    """Note in the facts of `after` the axis of each group that a pass put in the place of another of the same ranks.

    A new node has the axis of the first of its kind over those ranks that is gone.
    """
    facts, groups = facts_of(after), Groups(facts_of(before))
    old, new = ({node.name: (collective_kind(node.target), group_name_of(node)) for node in _starts(gm)}
                for gm in (before, after))
    gone = [old[name] for name in old if name not in new]
    for name, (kind, group) in new.items():
        ranks = group_ranks(group)
        places = [old[name]] if name in old else [place for place in gone if place[0] == kind]
        for _, was in places:
            axis = groups.axis(was)
            if axis and ranks and ranks == group_ranks(was) and group not in facts.groups.values():
                facts.groups[f"{axis}.{group}"] = group
                facts.group_sizes[group] = len(ranks)


def axis_names(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Axis by process group. A second group of an axis has a name of its own, such as `dp_shard.gather`."""
    return {name: axis for axis, name in facts_of(gm).groups.items()}


def waits_of(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The waits that a collective's result reaches through views and list items. A blocking one waits for itself."""
    if blocks(start.target):
        return [start]
    return [node for node in readers_of(start) if node.op == "call_function" and waits(node.target)]


def readers_of(start: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that read or write the result of a collective or a host copy, also through views: waits and others."""
    readers, todo, seen = [], [start], {start}
    for node in todo:
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            shares = (user.op == "call_function" and not waits(user.target)
                      and collective_kind(user.target) is None and node in aliased_inputs(user))
            if shares:
                todo.append(user)
            if not shares or written_inputs(user):
                readers.append(user)
    return readers


def collective_of(node: torch.fx.Node, groups: Groups) -> Collective:
    """A collective, or a copy to the host or back: a launch on the lane of its direction, of one rank."""
    copies = host_copy(node.target)
    kind = copies or collective_kind(node.target) or ""
    first = node.args[0] if node.args else next(iter(node.kwargs.values()))
    inputs = [n.meta.get("val") for n in (first if isinstance(first, list | tuple) else [first])
              if isinstance(n, torch.fx.Node)]
    value = inputs[0] if inputs else None
    group = copies or group_name_of(node)
    size = 1 if copies else argument(node, "group_size")
    ranks = size if isinstance(size, int) else groups.size(group)
    reduce_op = argument(node, "reduce_op") if kind in ("all_reduce", "reduce_scatter") else None
    bytes_in, bytes_out = sum(map(tensor_bytes, inputs)), tensor_bytes(node.meta.get("val"))
    if multiplies(node.target):  # what is sent is the first factor, or the product
        if kind == "all_gather":
            bytes_out = bytes_in * ranks
        else:
            bytes_in = bytes_out * ranks
    shape: tuple[int, ...] = ()
    dtype = "?"
    if isinstance(value, torch.Tensor):
        shape, dtype = tuple(map(hint, value.shape)), str(value.dtype).removeprefix("torch.")
    return Collective(
        kind, op_name(node.target), reduce_op, group, ranks, groups.axis(group), shape, dtype,
        bytes_in, bytes_out, node.name, tuple(w.name for w in waits_of(node)), module_path(node))


def list_collectives(gm: torch.fx.GraphModule) -> list[Collective]:
    """Every functional collective of the graph in node order, including bucketed and coalesced launches."""
    groups = Groups(facts_of(gm))
    return [collective_of(node, groups) for node in _starts(gm)]


def _starts(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return calls_of(gm.graph, lambda target: collective_kind(target) is not None)


def list_launches(gm: torch.fx.GraphModule) -> list[Collective]:
    """The collectives, and then the copies to the host and back."""
    groups = Groups(facts_of(gm))
    copies = calls_of(gm.graph, lambda target: host_copy(target) is not None)
    return list_collectives(gm) + [collective_of(node, groups) for node in copies]


def launches(collectives: Iterable[Collective]) -> dict[tuple[str, str], int]:
    """Number of launches by (kind, axis). Where the axis is unknown, the group's name stands in its place."""
    return dict(Counter((c.kind, c.axis or c.group) for c in collectives))


def exposed_in_node_order(gm: torch.fx.GraphModule) -> list[Collective]:
    """Collectives with neither a matmul nor attention between launch and first wait: nothing can hide them.

    Only the order counts here. The cost model decides whether the compute in between takes long enough. An operator
    that multiplies while it sends hides itself.
    """
    before: dict[str, int] = {}
    compute = 0
    for node in gm.graph.nodes:
        before[node.name] = compute
        compute += is_compute(node)
    alone = {node.name for node in gm.graph.nodes if not multiplies(node.target)}
    return [c for c in list_collectives(gm) if c.node in alone
            and (not c.waits or min(before[w] for w in c.waits) == before[c.node])]
