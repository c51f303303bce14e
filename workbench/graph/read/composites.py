"""Operators that a GPU runs as one kernel, where a CPU captures their parts: attention and RMS norm.

A CPU has no kernel for an attention whose keys are wider than its values, nor for RMS norm, so its capture holds
matmuls and pointwise operators instead. torch keeps the call that each node came from (`source_fn_stack`, and
`fwd_source_fn_stack` in the backward). Source: aten/src/ATen/native/transformers/attention.cpp
(`_scaled_dot_product_attention_math`), aten/src/ATen/native/layer_norm.cpp (`rms_norm_composite`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.cost import node_flops
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.devices.specs import DeviceSpec
from workbench.torch_api.module_paths import module_path
from workbench.torch_api.ops import hint

ATTENTION, NORM = "scaled_dot_product_attention", "rms_norm"
_Key = tuple[str, str, str]
RECOMPUTED = 5 / 4
"""A fused backward computes the scores again: five matmuls, where a capture that saved them has four."""


@dataclass(frozen=True)
class Composite:
    """The nodes of one call, in order. operator: ATTENTION or NORM. backward: whether nodes of its backward are there.
    """

    operator: str
    nodes: tuple[Node, ...]
    backward: bool


def composites(gm: GraphModule, spec: DeviceSpec) -> list[Composite]:
    """The calls of ATTENTION and NORM that the graph holds in parts, and that the device would run as one kernel.

    A decomposed norm is left out: a GPU's graph holds its parts, too.
    """
    if not spec.composite_kernels:
        return []
    calls: dict[_Key, list[Node]] = {}
    of: dict[Node, _Key] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if (key := _key(node, of)) is not None:
            of[node] = key
            calls.setdefault(key, []).append(node)
    fusible = []
    for (operator, *_), nodes in calls.items():
        kinds = {kind_of(node) for node in nodes}
        in_parts = "pointwise" in kinds and not any(map(_decomposed, nodes))
        if "attention" not in kinds if operator == ATTENTION else in_parts:
            fusible.append(Composite(operator, tuple(nodes), any(map(_is_backward, nodes))))
    return fusible


def _key(node: Node, of: Mapping[Node, _Key]) -> _Key | None:
    """The operator, the name of the call in the captured module, and the module, of a node of ATTENTION or NORM.

    A sum of two gradients of the same call belongs to the call, though torch records no origin of it.
    """
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    if not stack:
        keys = {of.get(operand) for operand in node.all_input_nodes}
        return keys.pop() if len(keys) == 1 else None
    name, operator = str(stack[-1][0]), getattr(stack[-1][1], "__name__", "")
    return (operator, name, module_path(node)) if operator in (ATTENTION, NORM) else None


def _is_backward(node: Node) -> bool:
    return "source_fn_stack" not in node.meta and kind_of(node) != "view"


def _decomposed(node: Node) -> bool:
    """Whether the node is a part of another operator of the capture."""
    original = node.meta.get("original_aten", node.target)
    return hasattr(node.target, "overloadpacket") and str(original) != str(node.target)


def attention_ms(call: Composite, spec: DeviceSpec) -> dict[Node, float]:
    """Milliseconds of each node of an attention in parts: its matmuls share the time of the kernel.

    The kernel computes in the dtype that it was given, which the parts raise to float32.
    """
    inputs = {n for node in call.nodes for n in (node, *node.all_input_nodes)}
    dtypes = {n.meta["val"].dtype for n in inputs if _floating(n)}
    dtype = min(dtypes, key=lambda d: (d.itemsize, str(d)), default=torch.float32)
    times = dict.fromkeys(call.nodes, 0.0)
    for node in call.nodes:
        if kind_of(node) != "matmul" or not (flop := node_flops(node)):
            continue
        tensors = [n.meta["val"] for n in (node, *node.all_input_nodes) if _floating(n)]
        sides = sorted(hint(side) for tensor in tensors for side in tensor.shape[-2:])
        backward = _is_backward(node)
        scores = RECOMPUTED if backward else 1
        times[node] = spec.attention_ms(flop * scores, sides[-1], sides[0], backward, dtype)
    return times


def _floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
