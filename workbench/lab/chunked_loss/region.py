"""Find the output layer and the cross entropy in a joint graph: every operator whose result has the logits' size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.read.nodes import is_backward, module_path
from workbench.torch_api import aot
from workbench.torch_api.ops import collective_kind, tensor_bytes

aten = torch.ops.aten
PRODUCT = aten.mm.default


@dataclass(frozen=True)
class LossRegion:
    """The operators between the output layer's input and the gradients of its input and its weight.

    product: the logits' matrix product. wide: nodes of the logits' size, tokens x vocabulary. nodes: these, what lies
    between them, and what reads them, in node order. tangent: the gradient of the loss that they read, if they do.
    """

    product: Node
    wide: frozenset[Node]
    nodes: tuple[Node, ...]
    tokens: int
    vocabulary: int
    tangent: Node | None

    @property
    def bytes(self) -> int:
        """Of the largest value of the logits' size."""
        return max(tensor_bytes(n.meta["val"]) for n in self.wide)


def leading(node: Node, tokens: int) -> int | None:
    """How many of the value's first dimensions make up the tokens: 1 for (tokens, ...), 2 for (batch, seq, ...)."""
    shape = node.meta["val"].shape if isinstance(node.meta.get("val"), torch.Tensor) else ()
    return next((n for n in (1, 2) if len(shape) >= n and prod(shape[:n]) == tokens), None)


def is_wide(node: Node, tokens: int, vocabulary: int) -> bool:
    """Whether a value has an element for each token and each entry of the vocabulary."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.numel() != tokens * vocabulary or value.ndim < 2:
        return False
    return value.shape[-1] == vocabulary or tuple(value.shape) == (vocabulary, tokens)


def find_loss(gm: GraphModule) -> LossRegion:
    """The region of the graph's cross entropy. Raises WorkbenchError, with the reason, where there is none to split."""
    picks = [n for n in gm.graph.find_nodes(op="call_function", target=aten.gather.default) if not is_backward(n)]
    for pick in picks:
        value = pick.args[0].meta["val"]  # type: ignore[union-attr]
        if value.ndim == 2 and (product := _product(pick.args[0], *value.shape)) is not None:  # type: ignore[arg-type]
            return _region(product, *value.shape)
    raise WorkbenchError("no loss of that form is in the graph: a matrix product with a cross entropy behind it, "
                         "decomposed, on the logits of whole tokens")


def _product(node: Node, tokens: int, vocabulary: int) -> Node | None:
    """The matrix product that a value of the logits' size is computed from."""
    todo, seen = [node], {node}
    for each in todo:
        if each.target is PRODUCT:
            return each
        above = [n for n in each.all_input_nodes if n not in seen and is_wide(n, tokens, vocabulary)]
        seen |= set(above)
        todo += above
    return None


def _region(product: Node, tokens: int, vocabulary: int) -> LossRegion:
    wide, todo, readers = {product}, [product], set[Node]()
    while todo:
        node = todo.pop()
        near = [] if node is product else [n for n in node.all_input_nodes if is_wide(n, tokens, vocabulary)]
        for user in node.users:
            if user.op == "output":
                raise WorkbenchError(f"the graph returns {node.name}, which has the logits' size: return less")
            if is_wide(user, tokens, vocabulary) and user.target is not PRODUCT:
                near.append(user)
            else:
                readers.add(user)
        todo += [n for n in near if n not in wide]
        wide |= set(near)
    given = {n for n in wide if n.op != "call_function"}
    if given:
        raise WorkbenchError(f"{min(given).name} has the logits' size and is an input of the graph")
    between = _behind(readers) & _ahead(wide)
    nodes = wide | readers | between
    sends = [n for n in nodes if collective_kind(n.target) is not None]
    if sends:
        raise WorkbenchError(
            f"each piece of the loss would need collectives of its own, such as {min(sends).name} in "
            f"{module_path(min(sends))}: the ranks of tp share the vocabulary. Set mesh.tp to 1, or drop the pass")
    tangents = {n for n in _ahead(nodes) if n.op == "placeholder" and aot.is_tangent(n)}
    if len(tangents) > 1 or any(n.meta["val"].ndim for n in tangents):
        raise WorkbenchError("the loss's gradient is no single number: return one scalar loss")
    return LossRegion(product, frozenset(wide), tuple(sorted(nodes)), tokens, vocabulary, next(iter(tangents), None))


def _behind(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that is computed from them."""
    return _reached(nodes, lambda node: node.users)


def _ahead(nodes: Iterable[Node]) -> set[Node]:
    """The nodes, and all that they are computed from."""
    return _reached(nodes, lambda node: node.all_input_nodes)


def _reached(nodes: Iterable[Node], near: Callable[[Node], Iterable[Node]]) -> set[Node]:
    found, todo = set[Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += near(node)
    return found
