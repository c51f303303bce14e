"""One piece of the loss: each operator of the region on the tokens of the piece, by a rule for its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from workbench.errors import WorkbenchError
from workbench.lab.chunked_loss.region import PRODUCT, LossRegion, leading
from workbench.torch_api.ops import op_name

aten = torch.ops.aten
PIECE = "loss_piece"
"""In a node's metadata: the number of the piece that it belongs to."""
_SHAPES = {"aten.view", "aten.reshape", "aten._unsafe_view", "aten.squeeze", "aten.unsqueeze"}
_REDUCES = {"aten.amax", "aten.sum", "aten.mean", "aten.amin", "aten.logsumexp"}
_PICKS = {"aten.gather", "aten.scatter"}
_EACH = {"aten.alias", "aten.detach", "aten.clone", "aten._to_copy", "prims.convert_element_type"}


class Splitter(Protocol):
    """What makes the pieces of `region`, of `size` tokens each; `call` adds a node."""

    region: LossRegion
    size: int

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node: ...


def sums(node: Node, region: LossRegion) -> bool:
    """Whether a product of the region sums over the tokens, as the weight's gradient does, or its transpose."""
    first, second = node.args[:2] if node.target is PRODUCT else (None, None)
    return second in region.wide or (first in region.wide and _turns(first))  # type: ignore[arg-type]


def _turns(node: Node) -> bool:
    return op_name(node.target) == "aten.permute" and node.meta["val"].ndim == 2


class Piece:
    """One piece's nodes. Each value of n tokens has the shape (n / pieces, ...) here."""

    def __init__(self, splitter: Splitter, number: int, given: dict[Node, Node]):
        self.to, self.number, self.given = splitter, number, given
        self.values: dict[Node, Node] = {}
        self._rows: dict[Node, Node] = {}

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.to.call(like, target, *args, **kwargs)
        node.meta[PIECE] = self.number
        return node

    def add(self, node: Node, before: Node | None) -> None:
        """Compute this piece of `node`; before: that of the piece before, where it is a result."""
        tokens, size = self.to.region.tokens, self.to.size
        lead = leading(node, tokens)
        name = op_name(node.target)
        args: Sequence[Any] = node.args
        rest = list(node.meta["val"].shape[lead:]) if lead else []
        if node.target is PRODUCT:
            self.values[node] = self._product(node, before)
        elif _turns(node):
            self.values[node] = self.call(node, node.target, self.row(args[0]), args[1])
        elif lead is None:
            raise self._unknown(node)
        elif name in _SHAPES:
            row = self.row(args[0])
            same = list(row.meta["val"].shape) == [size, *rest]
            self.values[node] = row if same else self.call(node, aten.view.default, row, [size, *rest])
        elif name == "aten.full":
            self.values[node] = self.call(node, node.target, [size, *rest], args[1], **node.kwargs)
        elif name == "aten.expand":
            self.values[node] = self.call(node, node.target, self.row(args[0]), [size, *rest])
        elif name in _REDUCES:
            self.values[node] = self._along(node, args[1], self.row(args[0]), [1], *args[2:])
        elif name in _PICKS:
            values = [self.row(a) if isinstance(a, Node) else a for a in args[2:]]
            self.values[node] = self._along(node, [args[1]], self.row(args[0]), 1, *values)
        elif name in _EACH or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            mapped = map_arg((node.args, node.kwargs), lambda n: self._beside(n, node))
            self.values[node] = self.call(node, node.target, *mapped[0], **mapped[1])
        else:
            raise self._unknown(node)

    def _along(self, node: Node, dims: Any, row: Node, dim: Any, *rest: Any) -> Node:
        """An operator along the vocabulary, which is the last dimension and the second one here."""
        ndim = node.args[0].meta["val"].ndim  # type: ignore[union-attr]
        if [d % ndim for d in dims] != [ndim - 1] or row.meta["val"].ndim != 2:
            raise self._unknown(node)
        return self.call(node, node.target, row, dim, *rest, **node.kwargs)

    def _product(self, node: Node, before: Node | None) -> Node:
        first: Any
        second: Any
        first, second = node.args
        if not sums(node, self.to.region):
            return self.call(node, PRODUCT, self.row(first), self.given[second])
        left = self.row(first) if first in self.values else self._slice(first, 1, self.given[first])
        right = self.row(second)
        return self.call(node, PRODUCT, left, right) if before is None else self.call(
            node, aten.addmm.default, before, left, right)

    def row(self, node: Node) -> Node:
        """This piece of a value with tokens."""
        if node in self.values:
            return self.values[node]
        if node not in self._rows:
            lead = leading(node, self.to.region.tokens)
            if lead is None:
                raise self._unknown(node)
            whole = self.given[node]
            if lead > 1:
                whole = self.call(node, aten.view.default, whole, [-1, *node.meta["val"].shape[lead:]])
            self._rows[node] = self._slice(node, 0, whole)
        return self._rows[node]

    def _slice(self, like: Node, dim: int, whole: Node) -> Node:
        begin = self.number * self.to.size
        return self.call(like, aten.slice.Tensor, whole, dim, begin, begin + self.to.size)

    def _beside(self, node: Node, result: Node) -> Node:
        """This piece of an operand of a pointwise operator, or all of one that has no tokens."""
        if node in self.values:
            return self.values[node]
        lead = leading(result, self.to.region.tokens) or 0
        mine, whole = node.meta["val"], result.meta["val"]
        if mine.ndim <= whole.ndim - lead:
            return self.given[node]
        if mine.ndim != whole.ndim or mine.shape[:lead] != whole.shape[:lead]:
            raise self._unknown(result)
        return self.row(node)

    def _unknown(self, node: Node) -> WorkbenchError:
        return WorkbenchError(f"{node.name}, {op_name(node.target)}, stands between logits and loss and is not known "
                              "to work token by token: drop the pass")


