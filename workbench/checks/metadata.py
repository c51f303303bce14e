"""Whether the dtype, device and shape in a node's metadata fit its operator's result."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.checks.snapshot import same_arguments
from workbench.graph.read.nodes import described
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
    faces: dict[int, Any] = {}
    with cached(after.graph), without_log(), torch.no_grad():
        told = [
            _wrong(node, known, faces)
            for node in after.graph.nodes
            if _changed(node, old.get(node.name))
        ]
    return list(filter(None, told))


def _changed(node: Node, old: Node | None) -> bool:
    """Whether operator, arguments or result changed, and the operator can run on fake values."""
    if not _runs_on_fake_values(node.target):
        return False
    if old is None or old.target != node.target or old.meta.get("val") is not node.meta.get("val"):
        return True
    return not same_arguments((old.args, old.kwargs), (node.args, node.kwargs),
                              lambda a, b: a.meta.get("val") is b.meta.get("val"))


@functools.cache
def _runs_on_fake_values(target: Any) -> bool:
    return target is operator.getitem or (
        isinstance(target, OPERATORS)
        and not writes(target)
        and not _SIZES_FROM_DATA.intersection(getattr(target, "tags", ()))
    )


def _wrong(node: Node, known: dict[Any, list[Any] | str], faces: dict[int, Any]) -> str:
    """`known` keeps an operator's results by its inputs' dtypes, devices and shapes: identical layers run once."""
    if any("val" not in n.meta for n in (node, *node.all_input_nodes)):
        return ""
    said = list(_faces(node.meta["val"], faces))
    key = (node.target, *_faces((node.args, node.kwargs), faces))
    if None in said or None in key:
        return ""
    if key not in known:
        known[key] = _result(node)
    gives = known[key]
    if isinstance(gives, str):
        given = ", ".join(n.name for n in node.all_input_nodes) or "its arguments"
        return f"node {node.name}: {op_name(node.target)} cannot take {given} ({gives}): mend its arguments"
    if not gives or [face[:3] for face in said] == [_face(v)[:3] for v in gives]:
        return ""
    told = _told(pytree.tree_leaves(node.meta["val"]))
    return (
        f"node {node.name} says that its result is {told}, and {op_name(node.target)} gives {_told(gives)}: "
        "set its meta['val'] to that, or mend its arguments"
    )


def _result(node: Node) -> list[Any] | str:
    """What the operator gives for its inputs' fake values; why it refuses them; [] where it cannot run on them."""
    args, kwargs = pytree.tree_map(
        lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, node.kwargs)
    )
    values = pytree.tree_leaves((node.meta["val"], args, kwargs))
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        return []
    try:
        with mode:
            return pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
    except Exception as error:
        return first_line(error) if _refuses(node.target, error) else []


def _faces(value: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """The face of each leaf, None for a symbolic one. `seen` keeps faces by identity, and the values alive."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from _faces(each, seen)
        return
    if id(value) not in seen:
        seen[id(value)] = value, None if is_symbolic(value) else _face(value)
    yield seen[id(value)][1]


def _refuses(target: Any, error: Exception) -> bool:
    """Whether the arguments are wrong. Otherwise there is no fake kernel (a subclass of RuntimeError), or the operator
    needs more than values, such as a process group.
    """
    return (
        type(error) in (RuntimeError, ValueError, IndexError)
        and getattr(target, "namespace", "aten") == "aten"
    )


def _face(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), value.stride()
    return type(value), repr(value), ()


def _told(values: list[Any]) -> str:
    return ", ".join(
        f"{described(v)} on {v.device}" if isinstance(v, torch.Tensor) else described(v)
        for v in values
    )
