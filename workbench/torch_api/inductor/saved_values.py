"""What the forward of a whole step saves is computed once, as in two graphs, where it is an output.

In one graph, Inductor computes a pointwise value inside each kernel that reads it, and keeps what it is computed from:
for a norm's weight, the whole bucket in which its block's weights were gathered, from the forward to the backward.
Source: torch/_inductor/ir.py (`TensorBox.realize`), torch/_inductor/lowering.py (`register_lowering`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from functools import cache, partial
from typing import Any

import torch
from torch.fx import Graph, Node

from workbench.torch_api.ops import aliased_inputs, op_name

torch.library.define("workbench::computed", "(Tensor(a) x) -> Tensor(a)")


@torch.library.impl("workbench::computed", ("CPU", "CUDA", "Meta"))
def _computed(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


@cache
def _lowered() -> Any:
    """The operator, which makes Inductor give its input a buffer."""
    from torch._inductor.lowering import register_lowering

    def computed(x: Any) -> Any:
        x.realize()
        return x

    target = torch.ops.workbench.computed.default
    register_lowering(target, type_promotion_kind=None)(computed)
    return target


def compute_once(graph: Graph, names: Collection[str]) -> None:
    """The named nodes, or what they are views of, get buffers of their own."""
    for node in dict.fromkeys(_owner(node) for node in graph.nodes if node.name in names):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_after(node):
            computed = graph.call_function(_lowered(), (node,))
        computed.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(computed, partial(operator.is_not, computed))


def computed_by(node: Node) -> Node:
    """The node that makes this one's value: the graph's own, where `compute_once` put an operator behind it."""
    return node.args[0] if op_name(node.target) == "workbench.computed" else node  # type: ignore[return-value]


def _owner(node: Node) -> Node:
    """The node whose storage this one shows: itself, or what it is a view of."""
    while aliased := aliased_inputs(node):
        node = aliased[0]
    return node
