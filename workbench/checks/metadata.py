"""Does what a pass's nodes say of their results fit what their operators give: dtype, device and shape."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.node_facts import described
from workbench.torch_api import tree as pytree
from workbench.torch_api.distributed.fake import FakeTensor, cached
from workbench.torch_api.ops import OPERATORS, is_symbolic, op_name, writes

_SIZES_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def wrong_results(before: GraphModule, after: GraphModule) -> list[str]:
    """One sentence for each node, new or changed since `before`, whose `meta["val"]` is not what its operator gives.

    The operator runs on its inputs' fake values. Left out: operators that write their inputs or whose result's shape
    depends on data, symbolic sizes, and what cannot run on fake values. Strides are not compared: a pass may state
    those that lowering will choose.
    """
    old = {node.name: node for node in before.graph.nodes}
    known: dict[Any, list[Any]] = {}
    with cached(after.graph), torch.no_grad():
        told = [_wrong(node, known) for node in after.graph.nodes if _changed(node, old.get(node.name))]
    return list(filter(None, told))


def _changed(node: Node, old: Node | None) -> bool:
    """Whether operator, inputs or result are others than before, of an operator that can be asked."""
    if not isinstance(node.target, OPERATORS) or writes(node.target):
        return False
    if _SIZES_FROM_DATA.intersection(getattr(node.target, "tags", ())):
        return False
    if old is None or old.target != node.target or len(old.all_input_nodes) != len(node.all_input_nodes):
        return True
    pairs = zip([node, *node.all_input_nodes], [old, *old.all_input_nodes], strict=True)
    return any(a.meta.get("val") is not b.meta.get("val") for a, b in pairs)


def _wrong(node: Node, known: dict[Any, list[Any]]) -> str:
    """`known` keeps what an operator gave, by its inputs' dtypes, devices and shapes: alike layers are asked once."""
    said = pytree.tree_leaves(node.meta.get("val"))
    given_to, spec = pytree.tree_flatten(pytree.tree_map(
        lambda a: a.meta.get("val") if isinstance(a, Node) else a, (node.args, node.kwargs)))
    mode = next((v.fake_mode for v in (*said, *given_to) if isinstance(v, FakeTensor)), None)
    if mode is None or any(map(is_symbolic, (*said, *given_to))):
        return ""
    key = (node.target, spec, tuple(map(_face, given_to)))
    if key not in known:
        args, kwargs = pytree.tree_unflatten(given_to, spec)
        try:
            with mode:
                known[key] = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        except Exception:  # no fake kernel, or one that asks for more than values
            known[key] = []
    gives = known[key]
    if all(_face(a)[:3] == _face(b)[:3] for a, b in zip(said, gives, strict=False)):
        return ""
    return (f"node {node.name} says that its result is {_told(said)}, and {op_name(node.target)} gives {_told(gives)}: "
            "set its meta['val'] to that, or mend its arguments")


def _face(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    return type(value), repr(value), ()


def _told(values: list[Any]) -> str:
    return ", ".join(f"{described(v)} on {v.device}" if isinstance(v, torch.Tensor) else described(v) for v in values)
