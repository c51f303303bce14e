"""The placement of a value in a captured graph: a parameter's own, or inferred from the collectives around it.

A graph works on one rank's tensors and records no placements of intermediate values. But a value that enters or leaves
a collective, directly or through views and copies, must be sharded, replicated or partial over the collective's axis.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.fx import Node

from workbench.graph.facts import GraphFacts, facts_of
from workbench.graph.read.collectives import Groups
from workbench.graph.read.nodes import kind_of
from workbench.torch_api.aot import gradient_of, parameter_of
from workbench.torch_api.ops import aliased_inputs, argument, collective_kind, group_name_of, tensor_bytes

CUT, WHOLE = "each rank holds its own part", "every rank holds the same"
_BEFORE = {"all_gather": CUT, "all_to_all": CUT}
_AFTER = {"all_gather": WHOLE, "all_reduce": WHOLE, "broadcast": WHOLE, "reduce_scatter": CUT, "all_to_all": CUT}
_CARRIES = ("view", "wait", "copy")

Placed = Callable[[str], str]


def words(tensor: DTensor, placements: Sequence[Placement] | None = None) -> str:
    """The placements in words, such as "dp_shard cuts dim 0, tp cuts dim 0"."""
    parts = []
    axes = tensor.device_mesh.mesh_dim_names or map(str, range(tensor.device_mesh.ndim))
    for axis, placement in zip(axes, placements or tensor.placements, strict=True):
        if placement.is_partial():
            parts.append(f"{axis} holds partial sums")
        elif placement.is_replicate():
            parts.append(f"{axis} replicates it")
        else:
            parts.append(f"{axis} cuts dim {placement.dim}")  # type: ignore[attr-defined]
    return ", ".join(parts)


def placement_of(node: Node, parameter: Placed | None = None) -> str:
    """The known placement of a node's value for each axis, and why it is unknown for the others.

    parameter: describes the placement of a parameter or buffer, by its name; "" where unknown.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor | list | tuple | None):
        return "none: it is no tensor"
    if node.op == "placeholder":
        name = parameter_of(node)
        if name and parameter and (placed := parameter(name)):
            return placed
    placed_over = {**_entering(node), **_leaving(node)}
    says = [f"{axis}: {placement}" for axis, placement in placed_over.items()]
    axes = _axes(node)
    rest = [axis for axis in axes if axis not in placed_over]
    if says and rest:
        says.append(f"{', '.join(rest)}: unknown, no collective beside it says")
    if not says and not axes:
        says = ["unknown: the graph names no mesh axis"]
    elif not says:
        says = ["unknown: no collective beside it says what the other ranks hold"]
    gradients = [f"gradient of {name}" for name in gradients_of(node)]
    return "; ".join([*gradients, *says])


def gradients_of(node: Node) -> list[str]:
    """The parameters whose gradient this node is, by the descriptors of the outputs."""
    names = []
    for user in node.users:
        if user.op == "output" and isinstance(values := user.args[0], list | tuple):
            descriptors = user.meta.get("desc") or [None] * len(values)
            names += [name for value, desc in zip(values, descriptors, strict=True)
                      if value is node and (name := gradient_of(desc))]
    return names


def _groups(node: Node) -> Groups:
    owner = node.graph.owning_module
    return Groups(facts_of(owner) if owner is not None else GraphFacts())


def _axes(node: Node) -> list[str]:
    """The mesh axes that the graph's facts name."""
    groups = _groups(node)
    return list(dict.fromkeys(groups.axis(name) or name for name in groups.names()))


def _axis(node: Node) -> str:
    group = group_name_of(node)
    return _groups(node).axis(group) or group


def _may_pick(view: Node, axis: str) -> bool:
    """Whether a view may be this rank's shard of its source: a slice, or an item of at most as many as ranks."""
    source = aliased_inputs(view)[0]
    value, whole = view.meta.get("val"), source.meta.get("val")
    if view.target is operator.getitem and isinstance(whole, list | tuple):
        groups = _groups(view)
        sizes = [groups.size(name) for name in groups.names() if groups.axis(name) == axis]
        return len(whole) <= max(sizes, default=len(whole))
    return tensor_bytes(value) < tensor_bytes(whole)


def _leaving(node: Node) -> dict[str, str]:
    """By axis, the placement after the collective that made this value. Sources of a copy must all agree."""
    if node.op != "call_function":
        return {}
    if kind := collective_kind(node.target):
        return {_axis(node): _AFTER[kind]}
    if aliased := aliased_inputs(node):
        return {axis: placement for axis, placement in _leaving(aliased[0]).items()
                if placement != WHOLE or not _may_pick(node, axis)}
    sources = node.all_input_nodes if kind_of(node) == "copy" else []
    first, *others = [_leaving(source) for source in sources] or [{}]
    return {axis: placement for axis, placement in first.items()
            if all(other.get(axis) == placement for other in others)}


def _entering(node: Node) -> dict[str, str]:
    """By axis, the placement that the collectives reading this value require."""
    placed_over: dict[str, str] = {}
    for user in node.users:
        if user.op != "call_function":
            continue
        if kind := collective_kind(user.target):
            if kind != "broadcast":  # which tells nothing of the other ranks' values
                reduced = f"partial, to be reduced by {argument(user, 'reduce_op')}"
                placed_over.setdefault(_axis(user), _BEFORE.get(kind, reduced))
        elif kind_of(user) in _CARRIES or isinstance(user.meta.get("val"), list | tuple):
            for axis, placement in _entering(user).items():
                if placement != CUT or not aliased_inputs(user) or not _may_pick(user, axis):
                    placed_over.setdefault(axis, placement)
    return placed_over
