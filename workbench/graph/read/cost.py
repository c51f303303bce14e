"""Estimated time of a node on a device, and the FLOP of a graph, from shapes alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from workbench.graph.read.collectives import Collective
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DEVICES, DeviceSpec
from workbench.torch_api.ops import COMPILED_REGION, HOST_COPIES, hint, multiplies, op_name, tensor_bytes
from workbench.torch_api.tree import tree_leaves

__all__ = ["DEVICES", "DeviceSpec", "collective_ms", "device_spec", "flops", "node_flops", "node_ms"]

_FREE = ("view", "bookkeeping", "wait", "collective", "host copy")


def _attention_flops(node: torch.fx.Node, backward: bool) -> int:
    """Unmasked matmuls of attention: 2 forward, 5 backward (one recomputes the scores). Key heads count as repeated."""
    inputs = [a.meta.get("val") for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.fx.Node)]
    shapes = [tuple(map(hint, t.shape)) for t in inputs if isinstance(t, torch.Tensor) and t.dim() == 4]
    # of the query, or of its gradient; torch 2.11 counts no fewer key heads
    heads = shapes[0][1]
    shapes = [(batch, heads, *rest) for batch, _, *rest in shapes]
    return int(sdpa_backward_flop_count(*shapes[:4]) if backward else sdpa_flop_count(*shapes[:3]))


def _grouped_flops(node: torch.fx.Node) -> int:
    """Each row of a grouped matmul is multiplied by one group's matrix. Two 2-D inputs split the summed dimension."""
    left, right = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    groups = left.shape[0] if (left.dim(), right.dim()) == (3, 2) else 1
    return 2 * hint(left.numel()) * hint(right.shape[-1]) // groups


def _fused_flops(node: torch.fx.Node) -> int:
    """The products of an operator that gathers its first factor, or scatters its product, while it multiplies."""
    values: Any = torch.fx.map_arg(node.args[:2], lambda n: n.meta["val"])
    first, second = values
    # the part of the product that stays on this rank is smaller
    if isinstance(second, torch.Tensor):
        return 2 * hint(first.numel()) * hint(second.shape[-1])
    products = node.meta["val"][1]
    return sum(
        2 * hint(out.numel()) * hint(b.shape[0]) for out, b in zip(products, second, strict=True)
    )


def node_flops(node: torch.fx.Node) -> int:
    """FLOP of a matmul, a convolution, attention, or all of these in a compiled region; else 0.

    Source: torch.utils.flop_counter.
    """
    if node.op != "call_function":
        return 0
    if COMPILED_REGION in node.meta:
        return int(node.meta[COMPILED_REGION]["flop"])
    name = op_name(node.target)
    if "scaled_dot_product" in name:
        return _attention_flops(node, "backward" in name)
    if name.endswith("_grouped_mm"):
        return _grouped_flops(node)
    if multiplies(node.target):
        return _fused_flops(node)
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return hint(formula(*args, **kwargs, out_val=node.meta.get("val")))


def flops(gm: torch.fx.GraphModule) -> dict[str, int]:
    """FLOP by operator, largest first."""
    counted: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if count := node_flops(node):
            counted[op_name(node.target)] += count
    return dict(counted.most_common())


def collective_ms(c: Collective, device: str | DeviceSpec, payload: int | None = None) -> float:
    """A collective alone, as measured, or else by the ring model; of a group of one nothing. Or a copy to the host.

    payload: bytes in place of its own.
    """
    sent, spec = c.payload if payload is None else payload, device_spec(device)
    if c.kind in HOST_COPIES:
        return spec.copying_ms(sent)
    return spec.sending_ms(c.kind, c.group_size, sent) if c.group_size > 1 else 0.0


def node_ms(node: torch.fx.Node, device: str | DeviceSpec) -> float:
    """The larger of two times: its FLOP, as measured or by the data sheet, and the bytes that it moves.

    0 for views, waits and collectives (see `collective_ms`), but not for products in one operator with a collective.
    Each operator counts as a separate kernel.
    """
    kind = kind_of(node)
    if node.op != "call_function" or (kind in _FREE and not multiplies(node.target)):
        return 0.0
    spec = device_spec(device)
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    read = [tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes]
    if kind == "index":  # reads some rows of a table
        read = [min(size, tensor_bytes(tensors)) for size in read]
    moving = spec.moving_ms(tensor_bytes(tensors) + sum(read))
    flop = node_flops(node)
    if not flop:
        return moving
    shape = tuple(map(hint, tensors[0].shape)) if tensors else ()
    dtype = tensors[0].dtype if tensors else torch.float32
    if kind == "attention" and len(shape) == 4:
        backward = "backward" in op_name(node.target)
        return max(moving, spec.attention_ms(flop, *shape[-2:], backward, dtype))
    rows = shape[-2] if len(shape) > 1 else 1
    columns = max(1, math.prod(shape) // max(1, rows))
    return max(moving, spec.product_ms(flop, rows, columns, dtype))


def step_flop(joint: torch.fx.GraphModule, microbatches: int) -> int:
    """Floating-point operations of one step on this rank, as its captured graph computes it for each microbatch."""
    return sum(flops(joint).values()) * microbatches
