"""Put saved tensors on the host: which ones, when each copy starts, and where the step waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

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
    results = facts_of(forward).step.results
    owner = roots(forward)
    held = Counter(owner[v] for v in values if isinstance(v, Node))
    touched = {owner[n] for node in calls_of(forward.graph, writes) for n in written_inputs(node)}
    moved = parameter_moves(forward)
    found = {}
    for place, node in enumerate(values[results:]):
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(node, Node) or not fills_its_memory(value):
            continue
        root = owner[node]
        alone = held[root] == 1 and root not in touched and tensor_bytes(value) == own_bytes(root)
        if alone and root.op == "call_function" and root not in moved:
            found[place] = node
    return found


def hidden(nodes: dict[int, Node], costs: Costs, clock: Clock) -> dict[int, Node]:
    """Those whose copies, one after another as the values are made, end before the forward does."""
    found, free = {}, 0.0
    for place, node in sorted(nodes.items(), key=lambda each: clock.finish[each[1]]):
        ends = max(free, clock.finish[node]) + costs.spec.copying_ms(tensor_bytes(node.meta["val"]))
        if ends <= clock.now:
            found[place], free = node, ends
    return found


def send(forward: GraphModule, nodes: dict[int, Node], costs: Costs) -> None:
    """Copy each to the host behind the node that makes it, and return the copy in its place.

    The wait, until which the device holds the tensor, stands where the copy ends, as estimated.
    """
    clock, order, free = simulate(forward.graph.nodes, costs), list(forward.graph.nodes), 0.0
    mode, output = fake_mode_of(forward), forward.graph.output_node()
    values, results = output_values(forward), facts_of(forward).step.results
    for place, node in sorted(nodes.items(), key=lambda each: clock.finish[each[1]]):
        free = max(free, clock.finish[node]) + costs.spec.copying_ms(tensor_bytes(node.meta["val"]))
        later = [n for n in order[order.index(node) + 1:] if n.op == "call_function" and clock.begin[n] >= free]
        host = NodeMaker(forward.graph, node.next, mode, node)(TO_HOST, node, list(node.meta["val"].stride()))
        until = later[0].next if later else output
        values[results + place] = NodeMaker(forward.graph, until, mode, node)(WAIT, host, node)
    output.args = (tuple(values),)


def bring_back(backward: GraphModule, names: Sequence[str], devices: Sequence[Any], costs: Costs) -> None:
    """Copy the inputs of these names back to the device in time for their first readers, which wait for the copies.

    The last reader's copy is placed first, as late as it is hidden, and each other copy ends before the next starts.
    """
    clock, order = simulate(backward.graph.nodes, costs), list(backward.graph.nodes)
    mode = fake_mode_of(backward)
    inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    first = {name: min(n for n in inputs[name].users) for name in names}
    calls = [n for n in order if n.op == "call_function"]
    free = float("inf")
    for name, device in sorted(zip(names, devices, strict=True), key=lambda each: first[each[0]], reverse=True):
        node, reader = inputs[name], first[name]
        needed = clock.begin.get(reader, clock.now)
        free = min(free, needed) - costs.spec.copying_ms(tensor_bytes(node.meta["val"]))
        before = next((n for n in calls if clock.begin[n] > max(free, 0.0)), reader)
        readers = list(node.users)
        with mode or nullcontext():
            node.meta["val"] = node.meta["val"].to("cpu")
        made = NodeMaker(backward.graph, min(before, reader), mode, node)(TO_DEVICE, node, device)
        back = NodeMaker(backward.graph, reader, mode, node)(WAIT, made, node)
        for user in readers:
            user.replace_input_with(node, back)
