"""Two captures of one step, aligned node by node, and every difference told by its kind.

A node is found again by its operator, its result and its module. Where metadata is lost, operator and result are left.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import no_exit
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Groups, list_collectives
from workbench.graph.read.nodes import is_backward, kind_of, provenance
from workbench.lab.traced_capture.cut import gradients_of
from workbench.notebook.graph_diff import displaced
from workbench.recipe.wording import counted
from workbench.torch_api import aot
from workbench.torch_api.ops import collective_kind, group_name_of, op_name
from workbench.torch_api.tree import tree_leaves

KINDS = ("inputs", "gradients", "collectives", "operators", "views", "bookkeeping", "order", "metadata")
"""bookkeeping computes no tensor, such as items, sizes and asserts; views share their input's memory."""
CAPTURES = ("joint", "traced")


@dataclass(frozen=True)
class CaptureDifference:
    """One difference. what: an operator, an input or an entry of the metadata. joint, traced: how often, or what, each
    capture has. count: the number of nodes that differ; 0 for a sum of bytes. nodes: the names of at most eight, of the
    joint capture, or where it has none of the traced one.
    """

    kind: str
    what: str
    joint: Any
    traced: Any
    count: int
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}: joint {self.joint}, traced {self.traced} ({counted(self.count, 'node')})"


@no_exit()
def compare_operators(joint: GraphModule, traced: GraphModule) -> tuple[int, list[CaptureDifference]]:
    """(number of aligned operators, every difference by kind), of the graphs before any pass."""
    both = joint, traced
    told = {n: _operator(n, groups) for g in both for groups in [Groups(facts_of(g))] for n in g.graph.nodes
            if n.op == "call_function"}
    pairs, left = _aligned([n for n in joint.graph.nodes if n in told], [n for n in traced.graph.nodes if n in told],
                           told)
    rows = [*_names("inputs", both, _inputs), *_names("gradients", both, _gradients), *_counts(left),
            *_names("collectives", both, _moved), *_order(pairs), *_lost(pairs)]
    return len(pairs), sorted(rows, key=lambda row: KINDS.index(row.kind))


def _aligned(joint: Sequence[Node], traced: Sequence[Node],
             told: dict[Node, Hashable]) -> tuple[list[tuple[Node, Node]], tuple[list[Node], ...]]:
    """Pairs in the order of the traced graph, and what is left on either side."""
    pairs: dict[Node, Node] = {}
    rest = [*joint]
    keys: list[Callable[[Node], Hashable]] = [
        lambda n: (told[n], provenance(n).module, provenance(n).backward), lambda n: (told[n], is_backward(n)),
        told.__getitem__]
    for key in keys:
        free = defaultdict[Hashable, list[Node]](list)
        for node in reversed(rest):
            free[key(node)].append(node)
        for node in traced:
            if node not in pairs and free[key(node)]:
                pairs[node] = free[key(node)].pop()
        taken = set(pairs.values())
        rest = [n for n in rest if n not in taken]
    return [(pairs[n], n) for n in traced if n in pairs], (rest, [n for n in traced if n not in pairs])


def _operator(node: Node, groups: Groups) -> Hashable:
    """The operator, its results, and its arguments but for nodes and symbols; a process group by its mesh axis."""
    results = tuple(map(_result, tree_leaves(node.meta.get("val"))))
    given = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, str | int | float | bool)]
    if collective_kind(node.target) is not None:
        name = group_name_of(node)
        given = [str(groups.axis(name)) if a == name else a for a in given]
    return op_name(node.target), results, tuple(map(str, given))


def _result(value: Any) -> str:
    """Dtype and shape. Each capture has its own symbols."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype}{[size if isinstance(size, int) else 's' for size in value.shape]}"


def _kind(node: Node) -> str:
    if op_name(node.target) == "aten.detach":
        return "views"
    return {"view": "views", "bookkeeping": "bookkeeping", "collective": "collectives",
            "wait": "collectives"}.get(kind_of(node), "operators")


def _counts(left: Sequence[Sequence[Node]]) -> Iterator[CaptureDifference]:
    """Operators that one capture has and the other has not, by name."""
    names = [Counter((_kind(n), op_name(n.target)) for n in nodes) for nodes in left]
    for kind, name in sorted(names[0] | names[1]):
        nodes = [n.name for side in left for n in side if (_kind(n), op_name(n.target)) == (kind, name)]
        joint, traced = (count[kind, name] for count in names)
        yield CaptureDifference(kind, name, joint, traced, len(nodes), tuple(nodes[:8]))


def _moved(graph: GraphModule) -> Counter[str]:
    """Bytes that a kind of collective moves over an axis; the group by its axis, as ranks name it differently."""
    total = Counter[str]()
    for collective in list_collectives(graph):
        total[f"bytes of {collective.kind} over {collective.axis}"] += collective.payload
    return total


def _order(pairs: Sequence[tuple[Node, Node]]) -> Iterator[CaptureDifference]:
    """The fewest nodes that stand elsewhere among those that both captures have; launches of collectives apart."""
    place = {node: i for i, node in enumerate(sorted(was for was, _ in pairs))}
    for what, kinds in (("collectives", {"collectives"}), ("other operators", {"operators", "views", "bookkeeping"})):
        some = [(was, now) for was, now in pairs if _kind(was) in kinds]
        names = tuple(some[i][0].name for i in sorted(displaced([place[was] for was, _ in some])))
        if names:
            yield CaptureDifference("order", what, "in its order", "elsewhere", len(names), names[:8])


def _lost(pairs: Sequence[tuple[Node, Node]]) -> Iterator[CaptureDifference]:
    """Metadata of aligned nodes that one capture lacks, or states otherwise."""
    reads: dict[str, Callable[[Node], Any]] = {
        "module": lambda n: provenance(n).module, "source line": lambda n: provenance(n).place,
        "direction": lambda n: "backward" if is_backward(n) else "forward"}
    for name, read in reads.items():
        rows = [(was.name, read(was), read(now)) for was, now in pairs]
        lost = [row for row in rows if bool(row[1]) != bool(row[2])]
        another = [row for row in rows if row[1] and row[2] and row[1] != row[2]]
        if lost:
            joint, traced = (sum(bool(row[side]) for row in lost) for side in (1, 2))
            yield CaptureDifference("metadata", f"{name} present", joint, traced, len(lost),
                                    tuple(row[0] for row in lost[:8]))
        if another:
            yield CaptureDifference("metadata", f"{name} differs", *another[0][1:], len(another),
                                    tuple(row[0] for row in another[:8]))


def _names(kind: str, both: Sequence[GraphModule],
           read: Callable[[GraphModule], Counter[str]]) -> Iterator[CaptureDifference]:
    joint, traced = map(read, both)
    for name in sorted(joint | traced):
        if joint[name] != traced[name]:
            count = abs(joint[name] - traced[name]) if kind != "collectives" else 0  # of bytes, not of nodes
            yield CaptureDifference(kind, name, joint[name], traced[name], count)


def _inputs(graph: GraphModule) -> Counter[str]:
    """Inputs by what they are: tensors by name, and meshes and sizes of DTensors together."""
    nodes = graph.graph.find_nodes(op="placeholder")
    return Counter(f"{aot.parameter_of(n) or ('a tangent' if aot.is_tangent(n) else 'the batch')}"
                   if isinstance(n.meta.get("val"), torch.Tensor) else "meshes and sizes of DTensors" for n in nodes)


def _gradients(graph: GraphModule) -> Counter[str]:
    return Counter(name for name, node in gradients_of(graph) if isinstance(node.meta.get("val"), torch.Tensor))
