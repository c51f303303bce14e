"""Add nodes to a graph, each with its fake value and the origin of a neighbour."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.torch_api.inductor.lowering import detect_fake_mode
from workbench.torch_api.ops import aliased_inputs

_NODE_META = ("val", "tensor_meta", "desc", "eager_input_vals")  # metadata that belongs to one node


def origin_of(node: Node) -> dict[str, Any]:
    """The metadata of a node that another one in its place inherits: all but what belongs to its value."""
    return {key: value for key, value in node.meta.items() if key not in _NODE_META}


def refresh_views(gm: GraphModule, fresh: set[Node]) -> None:
    """Give views of new values fake values that share their storage, as checks of memory expect."""
    mode = fake_mode_of(gm)
    for node in gm.graph.nodes:
        if node not in fresh and fresh.intersection(aliased_inputs(node)):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with mode or nullcontext():
                node.meta["val"] = node.target(*args, **kwargs)
            fresh.add(node)


def fake_mode_of(gm: GraphModule) -> Any:
    """The fake mode of the graph's values, or None."""
    return detect_fake_mode(
        [v for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    )


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
        node.meta = origin_of(self.origin) | {"val": value}
        node.meta["custom"] = dict(node.meta.get("custom") or {})  # which a later pass may write to
        return node
