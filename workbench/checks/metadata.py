"""Whether the dtype, device and shape in a node's metadata fit its operator's result."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.node_facts import described
from workbench.graph.read.snapshot import same_arguments
from workbench.recipe.wording import first_line
from workbench.torch_api import tree as pytree
from workbench.torch_api.distributed.fake import FakeTensor, cached, without_log
from workbench.torch_api.ops import OPERATORS, is_symbolic, op_name, writes

_SIZES_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def wrong_results(before: GraphModule, after: GraphModule) -> list[str]:
    """One sentence for each node, new or changed since `before`, whose `meta["val"]` is not its operator's result.

    The operator runs on its inputs' fake values; an aten operator that refuses them is reported too. Left out:
    operators that write their inputs or whose result's shape depends on data, symbolic sizes, and what cannot run on
    fake values. Strides are not compared: a pass may state the strides that lowering will choose.
    """
    old = {node.name: node for node in before.graph.nodes}
    known: dict[Any, list[Any] | str] = {}
    with cached(after.graph), without_log(), torch.no_grad():
        told = [_wrong(node, known) for node in after.graph.nodes if _changed(node, old.get(node.name))]
    return list(filter(None, told))


def _changed(node: Node, old: Node | None) -> bool:
    """Whether operator, arguments or result changed, and the operator can run on fake values."""
    if node.target is not operator.getitem and (not isinstance(node.target, OPERATORS) or writes(node.target)):
        return False
    if _SIZES_FROM_DATA.intersection(getattr(node.target, "tags", ())):
        return False
    if old is None or old.target != node.target or old.meta.get("val") is not node.meta.get("val"):
        return True
    return not same_arguments((old.args, old.kwargs), (node.args, node.kwargs),
                              lambda a, b: a.meta.get("val") is b.meta.get("val"))


def _wrong(node: Node, known: dict[Any, list[Any] | str]) -> str:
    """`known` keeps an operator's results by its inputs' dtypes, devices and shapes: identical layers run once."""
    if any("val" not in n.meta for n in (node, *node.all_input_nodes)):
        return ""
    said = pytree.tree_leaves(node.meta["val"])
    given_to, spec = pytree.tree_flatten(pytree.tree_map(
        lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, node.kwargs)))
    mode = next((v.fake_mode for v in (*said, *given_to) if isinstance(v, FakeTensor)), None)
    if mode is None or any(map(is_symbolic, (*said, *given_to))):
        return ""
    key = (node.target, spec, tuple(map(_face, given_to)))
    if key not in known:
        args, kwargs = pytree.tree_unflatten(given_to, spec)
        try:
            with mode:
                known[key] = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
        except Exception as error:
            known[key] = first_line(error) if _refuses(node.target, error) else []
    gives = known[key]
    if isinstance(gives, str):
        given = ", ".join(n.name for n in node.all_input_nodes) or "its arguments"
        return f"node {node.name}: {op_name(node.target)} cannot take {given} ({gives}): mend its arguments"
    if not gives or [_face(v)[:3] for v in said] == [_face(v)[:3] for v in gives]:
        return ""
    return (f"node {node.name} says that its result is {_told(said)}, and {op_name(node.target)} gives {_told(gives)}: "
            "set its meta['val'] to that, or mend its arguments")


def _refuses(target: Any, error: Exception) -> bool:
    """Whether the arguments are wrong. Otherwise there is no fake kernel (a subclass of RuntimeError), or the operator
    needs more than values, such as a process group.
    """
    return type(error) in (RuntimeError, ValueError, IndexError) and getattr(target, "namespace", "aten") == "aten"


def _face(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    return type(value), repr(value), ()


def _told(values: list[Any]) -> str:
    return ", ".join(f"{described(v)} on {v.device}" if isinstance(v, torch.Tensor) else described(v) for v in values)
