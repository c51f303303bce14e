"""Compute a loss in pieces of the tokens: of each the logits, the loss and at once the gradients, before the next.

The gradient of the loss is a factor of every gradient, and is not known in the forward. The pieces take 1 for it, and
the backward multiplies their results by it. Gradients of the input are put together in order; that of the weight is
summed in the pieces' order, in its own dtype, by matrix products that add to the sum so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from workbench.errors import WorkbenchError
from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.graph.products.fuse import in_order
from workbench.graph.read.nodes import is_backward
from workbench.lab.chunked_loss.piece import Piece, sums
from workbench.lab.chunked_loss.region import LossRegion
from workbench.torch_api.ops import collective_kind
from workbench.torch_api.partitioning import IN_FORWARD

aten = torch.ops.aten


def split(gm: GraphModule, region: LossRegion, pieces: int) -> None:
    """Compute the region in this many pieces, in place.

    Raises WorkbenchError where an operator is not known to work token by token.
    """
    _Splitter(gm, region, pieces).run()
    in_order(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


class _Splitter:
    def __init__(self, gm: GraphModule, region: LossRegion, pieces: int):
        self.graph: Graph = gm.graph
        self.region, self.pieces, self.size = region, pieces, region.tokens // pieces
        self.inside = set(region.nodes)
        self.mode = fake_mode_of(gm)
        outside = [u for n in region.nodes for u in n.users if u not in self.inside and not is_backward(u)]
        self.at = min(outside)
        self.copies: dict[Node, Node] = {}  # of backward nodes, in the forward with a gradient of 1
        self.scaled = self._scaled()

    def run(self) -> None:
        given = {n: self._forward(n) for node in self.region.nodes for n in node.all_input_nodes
                 if n not in self.inside}
        results = [n for n in self.region.nodes if any(user not in self.inside for user in n.users)]
        parts: dict[Node, list[Node]] = {n: [] for n in results}
        for piece in range(self.pieces):
            made = Piece(self, piece, given)
            for node in self.region.nodes:
                made.add(node, parts[node][-1] if parts.get(node) else None)
            for node in results:
                parts[node].append(made.values[node])
        for node in results:
            self._result(node, parts[node])
        for node in reversed(self.region.nodes):
            if not node.users:
                self.graph.erase_node(node)

    def _scaled(self) -> set[Node]:
        """The nodes of the region that have the loss's gradient as a factor."""
        found = {self.region.tangent} if self.region.tangent else set()
        for node in self.graph.nodes:
            if found.intersection(node.all_input_nodes):
                found.add(node)
        return found

    def _forward(self, node: Node) -> Node:
        """The node, or of a backward node a copy in the forward, for which the loss's gradient is 1."""
        if node is self.region.tangent:
            value = node.meta["val"]
            return self._once(node, aten.full.default, [], 1.0, dtype=value.dtype, device=value.device,
                              layout=torch.strided, pin_memory=False)
        if not is_backward(node):
            return node
        if collective_kind(node.target) is not None:
            raise WorkbenchError(f"the loss's gradient depends on a collective, {node.name}")
        args, kwargs = map_arg((node.args, node.kwargs), self._forward)
        return self._once(node, node.target, *args, **kwargs)

    def _once(self, node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        if node not in self.copies:
            self.copies[node] = self.call(node, target, *args, **kwargs)
        return self.copies[node]

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A forward node in front of the pieces' first reader, with its fake value and the origin of `like`."""
        node = NodeMaker(self.graph, self.at, self.mode, like)(target, *args, **kwargs)
        node.meta.pop("recompute", None)
        if "fwd_nn_module_stack" in node.meta:
            node.meta["nn_module_stack"] = node.meta.pop("fwd_nn_module_stack")
        node.meta["partitioner_tag"] = "is_forward"
        return node

    def _result(self, node: Node, parts: Sequence[Node]) -> None:
        """What the rest of the graph reads in the place of `node`."""
        value = node.meta["val"]
        whole = parts[-1] if sums(node, self.region) else self.call(node, aten.cat.default, list(parts))
        if whole.meta["val"].shape != value.shape:
            whole = self.call(node, aten.view.default, whole, list(value.shape))
        if whole.meta["val"].dtype != value.dtype or whole.meta["val"].shape != value.shape:
            raise WorkbenchError(f"in pieces, {node.name} would have another shape or dtype")
        if node in self.scaled:
            # or the backward would compute the pieces, or compute them again
            whole.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "partitioner_tag": IN_FORWARD}
            first = min(user for user in node.users if user not in self.inside)
            whole = NodeMaker(self.graph, first, self.mode, node)(aten.mul.Tensor, whole, self.region.tangent)
        node.replace_all_uses_with(whole, lambda user: user not in self.inside)
