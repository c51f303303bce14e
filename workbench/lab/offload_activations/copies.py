"""Put saved tensors on the host: which ones, when each copy starts, and where the step waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.read.memory import parameter_moves, roots
from workbench.graph.read.nodes import output_values
from workbench.graph.read.timeline import Clock, Costs, simulate
from workbench.torch_api.devices.host_copies import TO_DEVICE, TO_HOST, WAIT
from workbench.torch_api.ops import calls_of, own_bytes, tensor_bytes, writes, written_inputs


def fills_its_memory(value: object) -> bool:
    """Whether this is a tensor whose elements lie without gaps, so that a copy can have the same strides."""
    if not isinstance(value, torch.Tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.numel() > 0


def can_leave(forward: GraphModule) -> dict[int, Node]:
    """The saved tensors that a copy on the host can replace, by their place among what the forward saves.

    Each fills memory of its own, which nothing else that leaves the graph shares, and no parameter is gathered into.
    """
    values = output_values(forward)
    owner = roots(forward)
    shared = Counter(owner[value] for value in values if isinstance(value, Node))
    written = {
        owner[node] for call in calls_of(forward.graph, writes) for node in written_inputs(call)
    }
    moved = parameter_moves(forward)
    leaving = {}
    for place, node in enumerate(values[facts_of(forward).step.results:]):
        if not isinstance(node, Node) or not fills_its_memory(value := node.meta.get("val")):
            continue
        root = owner[node]
        alone = shared[root] == 1 and root not in written and tensor_bytes(value) == own_bytes(root)
        if alone and root.op == "call_function" and root not in moved:
            leaving[place] = node
    return leaving


def hidden(nodes: dict[int, Node], costs: Costs, clock: Clock) -> dict[int, Node]:
    """Those whose copies, one after another as the values are computed, end before the forward does."""
    chosen, free = {}, 0.0
    for place, node in sorted(nodes.items(), key=lambda item: clock.finish[item[1]]):
        ends = max(free, clock.finish[node]) + costs.spec.copying_ms(tensor_bytes(node.meta["val"]))
        if ends <= clock.now:
            chosen[place], free = node, ends
    return chosen


def send(forward: GraphModule, nodes: dict[int, Node], costs: Costs) -> None:
    """Copy each to the host behind the node that makes it, and return the copy in its place.

    The wait, until which the device holds the tensor, stands where the copy ends, as estimated.
    """
    clock, order = simulate(forward.graph.nodes, costs), list(forward.graph.nodes)
    mode, output = fake_mode_of(forward), forward.graph.output_node()
    values, results = output_values(forward), facts_of(forward).step.results
    free = 0.0
    for place, node in sorted(nodes.items(), key=lambda item: clock.finish[item[1]]):
        value = node.meta["val"]
        free = max(free, clock.finish[node]) + costs.spec.copying_ms(tensor_bytes(value))
        later = (n.next for n in order[order.index(node) + 1:]
                 if n.op == "call_function" and clock.begin[n] >= free)
        until = next(later, output)
        host = NodeMaker(forward.graph, node.next, mode, node)(TO_HOST, node, list(value.stride()))
        values[results + place] = NodeMaker(forward.graph, until, mode, node)(WAIT, host, node)
    output.args = (tuple(values),)


def bring_back(backward: GraphModule, nodes: Sequence[Node], costs: Costs) -> None:
    """Copy these inputs back to the device in time for their first readers, which wait for the copies.

    The last reader's copy is placed first, as late as it is hidden, and each other copy ends before the next starts.
    """
    clock = simulate(backward.graph.nodes, costs)
    mode = fake_mode_of(backward)
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    first = {node: min(node.users) for node in nodes}
    free = float("inf")
    for node in sorted(nodes, key=first.__getitem__, reverse=True):
        reader, readers, value = first[node], list(node.users), node.meta["val"]
        free = min(free, clock.begin.get(reader, clock.now)) - costs.spec.copying_ms(
            tensor_bytes(value)
        )
        before = next((call for call in calls if clock.begin[call] > max(free, 0.0)), reader)
        with mode or nullcontext():
            node.meta["val"] = value.to("cpu")
        copy = NodeMaker(backward.graph, min(before, reader), mode, node)(
            TO_DEVICE, node, value.device
        )
        back = NodeMaker(backward.graph, reader, mode, node)(WAIT, copy, node)
        for user in readers:
            user.replace_input_with(node, back)
