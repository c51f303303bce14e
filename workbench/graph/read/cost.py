"""Estimated time of a node on a device, and the FLOP of a graph, from shapes alone."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from workbench.graph.read.collectives import Collective
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.devices.estimators import repeat_heads
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DEVICES, DeviceSpec
from workbench.torch_api.ops import COMPILED_REGION, HOST_COPIES, hint, multiplies, op_name, tensor_bytes
from workbench.torch_api.tree import tree_leaves

__all__ = ["DEVICES", "DeviceSpec", "collective_ms", "device_spec", "flops", "node_flops", "node_ms"]

_FREE = ("view", "bookkeeping", "wait", "collective", "host copy")


def _attention_flops(node: torch.fx.Node, backward: bool) -> int:
    """Unmasked matmuls of attention: 2 forward, 5 backward (one recomputes the scores). Key heads count as repeated."""
    given = (
        a.meta.get("val")
        for a in (*node.args, *node.kwargs.values())
        if isinstance(a, torch.fx.Node)
    )
    shapes = [
        tuple(map(hint, t.shape)) for t in given if isinstance(t, torch.Tensor) and t.dim() == 4
    ]
    if backward:  # of the gradient, query, key and value
        return int(repeat_heads(sdpa_backward_flop_count)(*shapes[:4]))
    return int(repeat_heads(sdpa_flop_count)(*shapes[:3]))


def _grouped_flops(node: torch.fx.Node) -> int:
    """Each row of a grouped matmul is multiplied by one group's matrix. Two 2-D inputs split the summed dimension."""
    left, right = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    groups = left.shape[0] if (left.dim(), right.dim()) == (3, 2) else 1
    return 2 * hint(left.numel()) * hint(right.shape[-1]) // groups


def _fused_flops(node: torch.fx.Node) -> int:
    """The products of an operator that gathers its first factor, or scatters its product, while it multiplies."""
    given: Any = torch.fx.map_arg(node.args[:2], lambda n: n.meta["val"])
    first, second = given
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


def collective_ms(c: Collective, device: str | DeviceSpec) -> float:
    """A collective alone, as measured, or else by the ring model; of a group of one nothing. Or a copy to the host."""
    if c.kind in HOST_COPIES:
        return device_spec(device).copying_ms(c.payload)
    return (
        device_spec(device).sending_ms(c.kind, c.group_size, c.payload) if c.group_size > 1 else 0.0
    )


def node_ms(node: torch.fx.Node, device: str | DeviceSpec) -> float:
    """The larger of two times: its FLOP, as measured or by the data sheet, and the bytes that it moves.

    0 for views, waits and collectives (see `collective_ms`), but not for products in one operator with a collective.
    Each operator counts as a separate kernel.
    """
    if node.op != "call_function" or (
        (kind := kind_of(node)) in _FREE and not multiplies(node.target)
    ):
        return 0.0
    spec = device_spec(device)
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    read = [tensor_bytes(n.meta.get("val")) for n in node.all_input_nodes]
    if kind == "index":  # reads some rows of a table
        read = [min(size, tensor_bytes(tensors)) for size in read]
    moved = tensor_bytes(tensors) + sum(read)
    dtype = tensors[0].dtype if tensors else torch.float32
    flop = node_flops(node)
    return max(
        _computing_ms(node, flop, tensors, spec, dtype) if flop else 0.0, spec.moving_ms(moved)
    )


def _computing_ms(
    node: torch.fx.Node,
    flop: int,
    tensors: list[torch.Tensor],
    spec: DeviceSpec,
    dtype: torch.dtype,
) -> float:
    shape = tuple(map(hint, tensors[0].shape)) if tensors else ()
    if kind_of(node) == "attention" and len(shape) == 4:
        return spec.attention_ms(flop, *shape[-2:], "backward" in op_name(node.target), dtype)
    rows = shape[-2] if len(shape) > 1 else 1
    return spec.product_ms(flop, rows, max(1, math.prod(shape) // max(1, rows)), dtype)
