"""Nothing writes over a concatenation whose parts may be read later.

Inductor computes the parts of a concatenation in its buffer, as views of it. Its reinplacing pass takes the parts for
tensors of their own: it lets an operator, such as an all-reduce, write over the concatenation, and what reads a part
afterwards reads other values. Source: torch/_inductor/fx_passes/reinplace.py (`inplaceable_ops`), torch/_inductor/ir.py
(`ConcatKernel.realize_into`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from torch.fx import Node

from workbench.torch_api.ops import aliased_inputs, op_name

_JOINS = ("aten.cat", "aten.stack")


def _is_joined(value: Any) -> bool:
    """Whether a node is a concatenation, or a view of one."""
    while isinstance(value, Node):
        if op_name(value.target) in _JOINS:
            return True
        value = next(iter(aliased_inputs(value)), None)
    return False


def joined_kept() -> AbstractContextManager[Any]:
    """Inside, Inductor makes no operator write over a concatenation."""
    from torch._inductor.fx_passes import reinplace

    def kept(entry: Any) -> Any:
        return replace(entry, extra_check=lambda node: entry.extra_check(node) and not any(
            _is_joined(node.args[place]) for place in _places(entry.mutated_arg)))

    return patch.dict(
        reinplace.inplaceable_ops,
        {target: kept(op) for target, op in reinplace.inplaceable_ops.items()},
    )


def _places(mutated: int | tuple[int, ...]) -> tuple[int, ...]:
    return mutated if isinstance(mutated, tuple) else (mutated,)
