"""Add nodes to a graph, each with its fake value and the origin of a neighbour."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.torch_api.inductor.lowering import detect_fake_mode

_OWN = ("val", "tensor_meta", "desc", "eager_input_vals")  # metadata that belongs to one node


def fake_mode_of(gm: GraphModule) -> Any:
    """The fake mode of the graph's values, or None."""
    return detect_fake_mode([v for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)])


class NodeMaker:
    """Adds nodes before one node, each with its fake value and that node's origin; `origin`: another node's."""

    def __init__(self, graph: Graph, before: Node, mode: Any, origin: Node | None = None):
        self.graph, self.before, self.mode, self.origin = graph, before, mode, origin or before

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        values, keywords = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode or nullcontext():
            value = target(*values, **keywords)
        node.meta = {k: v for k, v in self.origin.meta.items() if k not in _OWN} | {"val": value}
        node.meta["custom"] = dict(node.meta.get("custom") or {})  # which a later pass may write to
        return node
