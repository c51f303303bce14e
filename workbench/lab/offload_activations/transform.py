"""Choose among the saved tensors, send them to the host in the forward, and bring them back in the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

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
    size = sum(tensor_bytes(n.meta["val"]) for n in sent)
    owner = roots(after[0])
    kept = {owner[v]: v for v in output_values(after[0]) if hasattr(v, "users")}
    still = [(n.all_input_nodes[0], kept[root]) for n in sent if (root := owner[n.all_input_nodes[0]]) in kept]
    exposed = [round(sum(simulate(gm.graph.nodes, order_costs(options, gm)).exposed_ms for gm in graphs), 4)
               for graphs in (before, after)]
    evidence = {"offloaded": len(sent), "bytes": size, "could_leave": len(can_leave(before[0])),
                "saved_bytes": [was, now], "exposed_ms": exposed}
    if not sent:
        return Effect(False, _why_none(before[0], options), evidence)
    if still:
        return Effect(False, f"{still[0][0].name} was copied to the host, and {still[0][1].name}, in the same memory, "
                             "is still saved on the device", evidence)
    if len(back) != len(sent) or was - now != size:
        return Effect(False, f"{len(sent)} tensors of {size:,} bytes were sent, {len(back)} come back, and the device "
                             f"saves {was - now:,} bytes less", evidence)
    device = sent[0].all_input_nodes[0].meta["val"].device.type
    return Effect(True, _PLAIN if device == "cpu" and facts_of(before[0]).world != "fake" else "", evidence)


def _why_none(forward: GraphModule, options: OffloadOptions) -> str:
    found = can_leave(forward)
    large = {p: n for p, n in found.items() if tensor_bytes(n.meta["val"]) >= options.min_bytes}
    if not found:
        return "no saved tensor has memory of its own"
    if not large:
        return f"none of {len(found)} tensors has {options.min_bytes:,} bytes: set min_bytes lower"
    if not _wanted(forward, large, options):
        return f"none of {len(large)} tensors belongs to {', '.join(options.modules)}"
    return f"no copy of {len(large)} tensors ends before the forward does, as estimated: set choose to \"all\""


def _wanted(forward: GraphModule, found: dict[int, Any], options: OffloadOptions) -> dict[int, Any]:
    inside = {n for path in options.modules for n in find_nodes(forward, module=path)}
    return {place: node for place, node in found.items()
            if tensor_bytes(node.meta["val"]) >= options.min_bytes and (node in inside or not options.modules)}


def order_costs(options: OffloadOptions, gm: GraphModule) -> Costs:
    """The costs by which the copies are placed."""
    return costs_of(gm, options.device, fused=options.fused)


@register_pass("offload_activations", effect=on_the_host, order_costs=order_costs)
def offload_activations(gm: GraphModule, example_inputs: list[Any], *, options: OffloadOptions) -> GraphModule:
    """Raises WorkbenchError for a device that is no CUDA GPU or CPU, where the host has no pinned memory, and where
    torch's own offloading is on.
    """
    facts = facts_of(gm)
    costs = order_costs(options, gm)
    if facts.part == "forward":
        require_alone()
        found = _wanted(gm, can_leave(gm), options)
        _require_device(found)
        if options.choose == "hidden":
            found = hidden(found, costs, simulate(gm.graph.nodes, costs))
        facts.step.offloaded = tuple(sorted(found))
        send(gm, found, costs)
        return gm
    inputs = gm.graph.find_nodes(op="placeholder")
    order = facts.step.saved_order or range(len(inputs))
    leaving = [n for n, place in zip(inputs, order, strict=False) if place in facts.step.offloaded]
    bring_back(gm, [n.name for n in leaving], [n.meta["val"].device for n in leaving], costs)
    return gm


def _require_device(found: dict[int, Any]) -> None:
    kinds = {n.meta["val"].device.type for n in found.values()}
    if other := kinds - {"cpu", "cuda"}:
        raise WorkbenchError(f"pass 'offload_activations': it copies from CUDA GPUs, and these tensors are on "
                             f"{min(other)}: drop the pass")
    if "cuda" in kinds and torch.cuda.is_available():
        require_pinned()
