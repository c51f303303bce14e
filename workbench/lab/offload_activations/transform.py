"""Choose among the saved tensors, send them to the host in the forward, and bring them back in the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.patterns import find_nodes
from workbench.graph.read.memory import roots, saved_tensors
from workbench.graph.read.nodes import output_values
from workbench.graph.read.timeline import Costs, costs_of, simulate
from workbench.lab.offload_activations import OffloadOptions
from workbench.lab.offload_activations.copies import bring_back, can_leave, hidden, send
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.torch_api.devices.host_copies import require_alone, require_pinned
from workbench.torch_api.ops import calls_of, host_copy, tensor_bytes

_PLAIN = "these ranks compute on CPUs: the copies lie in the same memory, and nothing is saved"


def on_the_host(before: Graphs, after: Graphs, options: OffloadOptions) -> Effect:
    """What is saved on the device is less by every tensor that was copied, and each copy comes back."""
    was, now = (sum(row.held_bytes for row in saved_tensors(*graphs)) for graphs in (before, after))
    sent, back = (calls_of(gm.graph, lambda target: host_copy(target) is not None) for gm in after)
    size = sum(tensor_bytes(node.meta["val"]) for node in sent)
    could = can_leave(before[0])
    evidence = {"offloaded": len(sent), "bytes": size, "could_leave": len(could),
                "saved_bytes": [was, now],
                "exposed_ms": [_exposed(before, options), _exposed(after, options)]}
    if not sent:
        return Effect(False, _why_none(before[0], could, options), evidence)
    owner = roots(after[0])
    kept = {
        owner[value]: value.name for value in output_values(after[0]) if isinstance(value, Node)
    }
    for node in sent:
        source = node.all_input_nodes[0]
        if owner[source] in kept:
            return Effect(False, f"{source.name} was copied to the host, and {kept[owner[source]]}, in "
                                 "the same memory, is still saved on the device", evidence)
    if len(back) != len(sent) or was - now != size:
        return Effect(False, f"{len(sent)} tensors of {size:,} bytes were sent, {len(back)} come back, "
                             f"and the device saves {was - now:,} bytes less", evidence)
    device = sent[0].all_input_nodes[0].meta["val"].device.type
    plain = device == "cpu" and facts_of(before[0]).world != "fake"
    return Effect(True, _PLAIN if plain else "", evidence)


def _exposed(graphs: Graphs, options: OffloadOptions) -> float:
    clocks = [simulate(gm.graph.nodes, order_costs(options, gm)) for gm in graphs]
    return round(sum(clock.exposed_ms for clock in clocks), 4)


def _why_none(forward: GraphModule, could: dict[int, Node], options: OffloadOptions) -> str:
    if not could:
        return "no saved tensor has memory of its own"
    if not any(tensor_bytes(node.meta["val"]) >= options.min_bytes for node in could.values()):
        return f"none of {len(could)} tensors has {options.min_bytes:,} bytes: set min_bytes lower"
    if not _wanted(forward, could, options):
        return f"none of {len(could)} tensors belongs to {', '.join(options.modules)}"
    return (f"no copy of {len(could)} tensors ends before the forward does, as estimated: "
            'set choose to "all"')


def _wanted(
    forward: GraphModule, could: dict[int, Node], options: OffloadOptions
) -> dict[int, Node]:
    inside = {node for path in options.modules for node in find_nodes(forward, module=path)}
    return {place: node for place, node in could.items()
            if tensor_bytes(node.meta["val"]) >= options.min_bytes
            and (node in inside or not options.modules)}


def order_costs(options: OffloadOptions, gm: GraphModule) -> Costs:
    """The costs by which the copies are placed."""
    return costs_of(gm, options.device, fused=True)


@register_pass("offload_activations", effect=on_the_host, order_costs=order_costs)
def offload_activations(
    gm: GraphModule, example_inputs: list[Any], *, options: OffloadOptions
) -> GraphModule:
    """Raises WorkbenchError for a device that is no CUDA GPU or CPU, where the host has no pinned memory, and where
    torch's own offloading is on.
    """
    facts = facts_of(gm)
    costs = order_costs(options, gm)
    if facts.part == "forward":
        require_alone()
        nodes = _wanted(gm, can_leave(gm), options)
        require_device(nodes.values())
        if options.choose == "hidden":
            nodes = hidden(nodes, costs, simulate(gm.graph.nodes, costs))
        facts.step.offloaded = tuple(sorted(nodes))
        send(gm, nodes, costs)
        return gm
    inputs = gm.graph.find_nodes(op="placeholder")
    order = facts.step.saved_order or range(len(inputs))
    bring_back(gm, [node for node, place in zip(inputs, order, strict=False)
                    if place in facts.step.offloaded], costs)
    return gm


def require_device(nodes: Iterable[Node]) -> None:
    """Raise WorkbenchError for tensors of another device than a CUDA GPU or a CPU."""
    kinds = {node.meta["val"].device.type for node in nodes}
    if other := kinds - {"cpu", "cuda"}:
        raise WorkbenchError(
            f"pass 'offload_activations': it copies from CUDA GPUs, and these tensors are on "
            f"{min(other)}: drop the pass"
        )
    if "cuda" in kinds and torch.cuda.is_available():
        require_pinned()
