"""The tensors of a joint graph that the backward can read, what computes each, and what computing it again costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from workbench.graph.read.cost import DeviceSpec, Known
from workbench.graph.read.fused_cost import fusion_groups
from workbench.graph.read.memory import Flow, item_roots
from workbench.graph.read.nodes import is_backward, kind_of, output_values
from workbench.graph.read.timeline import costs_of
from workbench.torch_api.aot import gradient_of, is_tangent
from workbench.torch_api.ops import draws, is_wait, own_bytes, written_inputs

_TAGGED = "tagged by another pass"
_AGAIN = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


@dataclass(eq=False)
class Producer:
    """An operator of the forward that makes tensors of its own.

    ms: what it adds to the step in the backward; 0 if only the backward needs it. inputs: the tensors that it
    reads, beside the graph's inputs. fixed: "saved" where it may not run twice, "repeated" where it has to;
    why: the reason.
    """

    node: Node
    ms: float
    inputs: list[Stored] = field(default_factory=list)
    results: list[Stored] = field(default_factory=list)
    fixed: str = ""
    why: str = ""
    holds_parameters: bool = False

    @property
    def decided(self) -> bool:
        """Whether another pass has tagged it to run again, so that no plan pays for that."""
        return self.fixed == "repeated" and self.why == _TAGGED


@dataclass(eq=False)
class Stored:
    """Memory that a forward operator allocates. node: its owner. read: whether the backward reads it or a view of it.

    holders: the owner, and for a collective its waits, which are the values. views: all nodes that show this memory.
    """

    node: Node
    bytes: int
    producer: Producer
    read: bool = False
    holders: list[Node] = field(default_factory=list)
    views: list[Node] = field(default_factory=list)


def repeating_ms(gm: GraphModule, device: str | DeviceSpec, known: Known, fused: bool) -> dict[Node, float]:
    """Milliseconds of each node where it runs again; a collective's are not hidden.

    fused: the operators of one fused kernel share its time by the bytes of their results.
    """
    costs = costs_of(gm, device, known, fused=fused)
    found = {node: costs.compute[node] + costs.collective.get(node, 0.0) for node in costs.compute}
    for group in fusion_groups(gm) if fused else []:
        total, size = sum(found[n] for n in group), sum(map(own_bytes, group))
        found |= {n: total * own_bytes(n) / size for n in group if size}
    return found


def read_values(gm: GraphModule, ms: Mapping[Node, float], *, collectives: bool = False) -> list[Producer]:
    """The producers of the forward, in node order. collectives: those of activations may run again.

    May not run again: draws of random numbers, what writes to its input, and collectives, but for those that a pass has
    tagged to be recomputed. What has a tag to be saved stays saved.
    """
    flow = Flow(gm)
    item = item_roots(gm, flow.owner)
    gradients = {value for value, desc in zip(output_values(gm), gm.graph.output_node().meta.get("desc") or (),
                                              strict=False) if gradient_of(desc) is not None}
    behind = behind_tangents(gm)
    needed = _needed_by_forward(gm, gradients, behind)
    producers: dict[Node, Producer] = {}
    stored: dict[Node, Stored] = {}
    for node in gm.graph.nodes:
        later = is_backward(node) or node in behind
        if node.op == "call_function" and not later:
            root = item[node]
            if root is node and isinstance(node.meta.get("val"), torch.Tensor):
                made = producers.setdefault(flow.owner[node], Producer(flow.owner[node], ms[flow.owner[node]]))
                stored[node] = Stored(node, own_bytes(node), made)
                made.results.append(stored[node])
            if root in stored:
                stored[root].views.append(node)
                if root is node or is_wait(node.target):
                    stored[root].holders.append(node)
        for given in node.all_input_nodes:
            kept = stored.get(item[given])
            if kept is not None and (later or (node.op == "output" and given in gradients)):
                kept.read = True
    for made in producers.values():
        read = dict.fromkeys(item[n] for n in made.node.all_input_nodes)
        made.inputs = [stored[n] for n in read if n in stored]
        made.holds_parameters = all(flow.parameters(each.node) is not None for each in made.results)
        if made.node in needed:
            made.fixed, made.why = _fixed(made, collectives)
        else:  # a partitioner never puts it into the forward, whatever its tag says
            made.ms, made.fixed, made.why = 0.0, "repeated", "only the backward needs it"
    return list(producers.values())


def _needed_by_forward(gm: GraphModule, gradients: set[Any], behind: set[Node]) -> set[Node]:
    """What the forward's results are computed from, and what it writes."""
    needed = {n for n in output_values(gm) if isinstance(n, Node) and n not in gradients}
    for node in reversed(gm.graph.nodes):
        runs = node.op == "call_function" and not (is_backward(node) or node in behind)
        if runs and (node in needed or written_inputs(node)):
            needed |= {node, *node.all_input_nodes}
    return needed


def behind_tangents(gm: GraphModule) -> set[Node]:
    """The tangents and all that is computed from them; some of it may lack the tag of a backward's node."""
    reached: set[Node] = {n for n in gm.graph.find_nodes(op="placeholder") if is_tangent(n)}
    for node in gm.graph.nodes:
        if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def without_tangents(gm: GraphModule) -> list[Node]:
    """Nodes of the backward that no tangent reaches: a partitioner could move them to the forward, and save them."""
    reached = behind_tangents(gm)
    return [n for n in gm.graph.nodes if n.op == "call_function" and is_backward(n) and n not in reached]


def _fixed(made: Producer, collectives: bool) -> tuple[str, str]:
    nodes = [made.node, *(n for each in made.results for n in each.holders)]
    tags = {n.meta.get("recompute") for n in nodes}
    if draws(made.node):
        return "saved", "a second draw would give other numbers"
    if tags & set(_AGAIN):
        return "repeated", _TAGGED
    if CheckpointPolicy.MUST_SAVE in tags:
        return "saved", _TAGGED
    if written_inputs(made.node):
        return "saved", "it writes to its input"
    if kind_of(made.node) == "collective" and (made.holds_parameters or not collectives):
        return "saved", ("a gathered parameter, which reshard_after_forward frees" if made.holds_parameters
                         else "a collective")
    return "", ""

