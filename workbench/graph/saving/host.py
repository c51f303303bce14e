"""Tensors that may wait on the host for the backward, and what their copies take beyond the compute that hides them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.nodes import is_backward, layer_of, output_values
from workbench.graph.read.timeline import Costs
from workbench.graph.saving.values import HostCopy, Producer, behind_tangents
from workbench.torch_api.ops import tensor_bytes


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


def offer(gm: GraphModule, producers: Sequence[Producer], costs: Costs) -> None:
    """State for each tensor that the backward reads, and that alone fills its memory, what copies of it would cost.

    Only compute hides a copy, not other communication. A tensor is due when the backward first computes something of
    its layer, since what runs again there may read it, too.
    """
    behind = behind_tangents(gm)
    now, ends, begins = [0.0, 0.0], dict[Node, float](), dict[Node, float]()
    first: dict[int | None, float] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        later = is_backward(node) or node in behind
        if later:
            begins[node] = now[1]
            first.setdefault(layer_of(node), now[1])
        now[later] += costs.compute[node]
        ends[node] = now[later]
    leaving = set(output_values(gm))
    for made in producers:
        each = made.results[0]
        alone = len(made.results) == 1 and each.node is made.node and leaving.isdisjoint(each.views)
        if not (each.read and alone and fills_its_memory(each.node.meta["val"])) or made.holds_parameters:
            continue
        due = min(begins[user] for node in each.views for user in node.users if user in begins)
        layer = layer_of(each.node)
        each.host = HostCopy(costs.spec.copying_ms(tensor_bytes(each.node.meta["val"])), now[0] - ends[each.node],
                             due if layer is None else min(due, first.get(layer, due)))


def exposed_ms(copies: Iterable[HostCopy]) -> float:
    """What the step takes longer by these copies: each way they run one after another, beside compute.

    To the host, all that is made with less than `left` to go is copied within `left`, or the forward waits at its end.
    Back to the device, all that is due by `due` is copied by then, or the backward waits.
    """
    listed = list(copies)
    return _late((c.left, c.ms) for c in listed) + _late((c.due, c.ms) for c in listed)


def _late(copies: Iterable[tuple[float, float]]) -> float:
    """By how much copies of (room, ms) overrun the room that they have, in the order of their rooms."""
    most = taken = 0.0
    for room, ms in sorted(copies):
        taken += ms
        most = max(most, taken - room)
    return most
