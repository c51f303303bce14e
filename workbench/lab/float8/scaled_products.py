"""Products of linear layers as scaled products of float8: `aten._scaled_mm`, in the layout that an sm90 GPU takes.

The left operand of a scaled product is row-major and the right one column-major. A matrix is cast once, in the layout
that it has. Where a product needs the other layout, the float8 cast is transposed and copied: one byte an element.
The largest magnitude maps to the largest float8, and a product is multiplied by the inverse scales of both operands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.make_nodes import NodeMaker, fake_mode_of
from workbench.lab.float8.linear import FORWARD, Product, untransposed, viewed

aten, prims = torch.ops.aten, torch.ops.prims
SCALED, CONVERT = aten._scaled_mm.default, prims.convert_element_type.default
MULTIPLE = 16
"""The inner and the last size of a scaled product are multiples of this, in elements."""
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SMALLEST = 1e-12  # a tensor of zeros has a scale, too
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def cannot(product: Product) -> str:
    """Why a linear layer's product cannot be scaled, whatever the options say; "" if it can."""
    _, k, n = product.sizes
    for size in (k, n):
        if size % MULTIPLE:
            return f"size {size} is no multiple of {MULTIPLE}"
    for operand in product.node.all_input_nodes[:2]:
        base = untransposed(operand)[0].meta["val"]
        if base.dtype not in _SOURCES:
            return f"an operand is {base.dtype}".replace("torch.", "")
        if tuple(base.stride()) != (base.shape[1], 1):
            return f"an operand has strides {tuple(base.stride())}"
    return ""


@dataclass(frozen=True)
class Cast:
    """A matrix in float8, laid out as `base` is, and what its elements are to be multiplied by: one number, or one for
    each row or column.
    """

    base: Node
    value: Node
    inverse: Node


def largest(make: NodeMaker, base: Node, dim: int | None) -> Node:
    """The largest magnitude along `dim`, which is kept, or of all elements, in float32."""
    magnitude = make(aten.abs.default, base)
    if dim is not None:
        magnitude = make(aten.amax.default, magnitude, [dim], True)
    else:
        for _ in range(base.meta["val"].ndim):  # by rows first: the kernel that makes them can do it
            magnitude = make(aten.amax.default, magnitude, [-1])
    if magnitude.meta["val"].dtype is torch.float32:
        return magnitude
    return make(CONVERT, magnitude, torch.float32)


def inverse_scale(make: NodeMaker, magnitude: Node, dtype: torch.dtype) -> Node:
    """What the float8 elements are to be multiplied by, so that `magnitude` becomes the largest one."""
    return make(aten.mul.Scalar, make(aten.clamp_min.default, magnitude, _SMALLEST), 1 / torch.finfo(dtype).max)


def scaled(make: NodeMaker, base: Node, inverse: Node, dtype: torch.dtype) -> Node:
    """base / inverse, in float8."""
    wide = base if base.meta["val"].dtype is torch.float32 else make(CONVERT, base, torch.float32)
    return make(CONVERT, make(aten.mul.Tensor, wide, make(aten.reciprocal.default, inverse)), dtype)


@dataclass
class Float8:
    """Rewrites products of one joint graph.

    rowwise: a scale for each row of the left operand and each column of the right one, else one for each tensor.
    gradient: the type of gradients.
    """

    gm: GraphModule
    rowwise: bool
    gradient: torch.dtype
    casts: dict[tuple[Any, ...], Cast] = field(default_factory=dict)
    _copies: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mode = fake_mode_of(self.gm)

    def convert(self, product: Product) -> None:
        """Put a scaled product in the place of `product`."""
        node = product.node
        gradient = self.gradient if product.which != FORWARD else TYPES["e4m3"]
        a, a_scale = self._operand(node, 0, gradient)
        b, b_scale = self._operand(node, 1, TYPES["e4m3"])
        scaled_product = NodeMaker(self.gm.graph, node, self.mode)(
            SCALED, a, b, a_scale, b_scale, None, None, node.meta["val"].dtype,
            product.which == FORWARD)  # whose tensor cores may sum in fewer bits
        values = torch.fx.map_arg(scaled_product.args, lambda n: n.meta["val"])
        scaled_product.meta["eager_input_vals"] = values, {}  # strides to keep
        node.replace_all_uses_with(scaled_product)
        erase_unread(node)

    def _operand(self, product: Node, side: int, dtype: torch.dtype) -> tuple[Node, Node]:
        """The left (0) or right (1) operand in float8, and its inverse scale."""
        node = product.args[side]
        assert isinstance(node, Node)
        base, turned = untransposed(node)
        contracted = (1 - side) ^ turned  # the dimension of the base that the product sums over
        cast = self._cast(base, contracted if self.rowwise else None, dtype, product)
        value = cast.value if turned == bool(side) else self._transposed(cast.value)
        if side:
            value = NodeMaker(self.gm.graph, value.next, self.mode, value)(aten.permute.default, value, [1, 0])
        rows, columns = node.meta["val"].shape
        shape = [1, columns] if side else [rows, 1]
        if not self.rowwise or list(cast.inverse.meta["val"].shape) == shape:
            return value, cast.inverse
        make = NodeMaker(self.gm.graph, cast.inverse.next, self.mode, cast.inverse)
        return value, make(aten.view.default, cast.inverse, shape)

    def _cast(self, base: Node, dim: int | None, dtype: torch.dtype, reader: Node) -> Cast:
        """`base` is cast once, behind it; an input of the graph before its first reader."""
        key = viewed(base), tuple(base.meta["val"].shape), dim, dtype
        if key not in self.casts:
            is_input = base.op == "placeholder"
            before, origin = (reader, reader) if is_input else (base.next, base)
            make = NodeMaker(self.gm.graph, before, self.mode, origin)
            inverse = inverse_scale(make, largest(make, base, dim), dtype)
            self.casts[key] = Cast(base, scaled(make, base, inverse, dtype), inverse)
        return self.casts[key]

    def _transposed(self, value: Node) -> Node:
        """A row-major copy of the transposed matrix."""
        if value not in self._copies:
            make = NodeMaker(self.gm.graph, value.next, self.mode, value)
            turned = make(aten.permute.default, value, [1, 0])
            self._copies[value] = make(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self._copies[value]


def erase_unread(node: Node) -> None:
    """Remove an operator that nobody reads, and then its inputs likewise."""
    todo, gone = [node], set[Node]()
    while todo:
        node = todo.pop()
        if node.op == "call_function" and not node.users and node not in gone:
            todo += node.all_input_nodes
            gone.add(node)
            node.graph.erase_node(node)
