"""Whether the dtype, device and shape in a node's metadata fit its operator's result."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.nodes import placed
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
    old = {node.name: _written(node) for node in before.graph.nodes}
    results: dict[Any, list[Any] | str] = {}
    with cached(after.graph), without_log(), torch.no_grad():
        problems = [_wrong(node, results) for node in after.graph.nodes
                    if _runs_on_fake_values(node.target) and old.get(node.name) != _written(node)]
    return list(filter(None, problems))


def _written(node: Node) -> tuple[Any, ...]:
    """Operator, arguments by the identity of their values, and result."""
    arguments = torch.fx.map_arg((node.args, node.kwargs), lambda n: id(n.meta.get("val")))
    return node.target, repr(arguments), id(node.meta.get("val"))


@functools.cache
def _runs_on_fake_values(target: Any) -> bool:
    return target is operator.getitem or (
        isinstance(target, OPERATORS)
        and not writes(target)
        and not _SIZES_FROM_DATA.intersection(getattr(target, "tags", ()))
    )


def _wrong(node: Node, results: dict[Any, list[Any] | str]) -> str:
    """`results` keeps an operator's results by its inputs' dtypes, devices and shapes: identical layers run once."""
    if any("val" not in n.meta for n in (node, *node.all_input_nodes)):
        return ""
    args, kwargs = pytree.tree_map(
        lambda a: a.meta["val"] if isinstance(a, Node) else a, (node.args, node.kwargs)
    )
    stated, inputs = pytree.tree_leaves(node.meta["val"]), pytree.tree_leaves((args, kwargs))
    if any(map(is_symbolic, [*stated, *inputs])):
        return ""
    key = node.target, repr(pytree.tree_map(_layout, (args, kwargs)))
    if key not in results:
        mode = next((v.fake_mode for v in [*stated, *inputs] if isinstance(v, FakeTensor)), None)
        results[key] = _result(node.target, args, kwargs, mode)
    gives = results[key]
    if isinstance(gives, str):
        names = ", ".join(n.name for n in node.all_input_nodes) or "its arguments"
        return f"node {node.name}: {op_name(node.target)} cannot take {names} ({gives}): mend its arguments"
    was, now = ([_face(value) for value in values] for values in (stated, gives))
    if not gives or was == now:
        return ""
    return (
        f"node {node.name} says that its result is {', '.join(was)}, and {op_name(node.target)} gives "
        f"{', '.join(now)}: set its meta['val'] to that, or mend its arguments"
    )


def _result(target: Any, args: Any, kwargs: Any, mode: Any) -> list[Any] | str:
    """What the operator gives for fake values; why it refuses them; [] where it cannot run on them."""
    if mode is None:
        return []
    try:
        with mode:
            return pytree.tree_leaves(target(*args, **kwargs))
    except Exception as error:
        return first_line(error) if _refuses(target, error) else []


def _refuses(target: Any, error: Exception) -> bool:
    """Whether the arguments are wrong. Otherwise there is no fake kernel (a subclass of RuntimeError), or the operator
    needs more than values, such as a process group.
    """
    return (
        type(error) in (RuntimeError, ValueError, IndexError)
        and getattr(target, "namespace", "aten") == "aten"
    )


def _face(value: Any) -> str:
    return placed(value) if isinstance(value, torch.Tensor) else repr(value)


def _layout(value: Any) -> Any:
    """The face, with strides, on which a view's success depends."""
    return (_face(value), value.stride()) if isinstance(value, torch.Tensor) else repr(value)
