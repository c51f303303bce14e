"""The effects of an operator on its tensors, read from its schema, and the private lookups of graph checks.

Source: torch/_ops.py (OpOverload._schema), torch/distributed/distributed_c10d.py (process groups by name).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
COMPILED_REGION = "compiled_region"
"""Key in the metadata of a node that calls a compiled region."""
HOST_COPIES = ("to_host", "to_device")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
# These return their input or a copy of it, depending on its layout or dtype.
_MAYBE_COPIES = {"aten.contiguous", "aten.reshape", "aten.to", "aten.type_as", "aten.expand_as"}


@functools.cache
def op_name(target: Any) -> str:
    """`aten.mm`, `_c10d_functional.wait_tensor`, `operator.getitem`: without overload, equal in every torch version."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if isinstance(target, str):
        return target
    module = (getattr(target, "__module__", "") or "").lstrip("_")
    return f"{module}.{getattr(target, '__name__', str(target))}"


_SHAPE_READERS = {"aten.sym_size", "aten.sym_stride", "aten.sym_numel", "aten.sym_storage_offset"}


def reads_shape(target: Any) -> bool:
    """Whether the operator reads a tensor's sizes and not its values."""
    return op_name(target) in _SHAPE_READERS


@functools.cache
def collective_kind(target: Any) -> str | None:
    """One of `COLLECTIVE_KINDS` if the operator launches a functional collective, else None (a wait too)."""
    if multiplies(target):
        return _FUSED[op_name(target)]
    if blocks(target):
        return "all_to_all"
    namespace, _, name = op_name(target).partition(".")
    if namespace not in COLLECTIVE_NAMESPACES:
        return None
    return next((kind for kind in COLLECTIVE_KINDS if name.startswith(kind)), None)


_FUSED = {
    "symm_mem.fused_all_gather_matmul": "all_gather",
    "symm_mem.fused_matmul_reduce_scatter": "reduce_scatter",
}


def multiplies(target: Any) -> bool:
    """Whether the operator is a collective and the matrix products beside it in one: see `symmetric_memory`."""
    return op_name(target) in _FUSED


def blocks(target: Any) -> bool:
    """Whether the operator returns after its collective has ended, and therefore has no wait.

    Those that multiply, too, do. On GPUs, DTensor's all-to-all from one sharded dimension to another does
    (shard_dim_alltoall in torch/distributed/tensor/_collective_utils.py). On a CPU it is an all-gather.
    """
    return op_name(target) == "_dtensor.shard_dim_alltoall" or multiplies(target)


@functools.cache
def is_wait(target: Any) -> bool:
    return op_name(target) in tuple(f"{n}.wait_tensor" for n in COLLECTIVE_NAMESPACES)


_OFFLOADING = {"ao.offload": "workbench.to_host", "ao.reload": "workbench.to_device"}


@functools.cache
def host_copy(target: Any) -> str | None:
    """"to_host" or "to_device" if the operator starts such a copy, ours or torch's: see `host_copies`; else None."""
    name = op_name(target)
    namespace, _, name = _OFFLOADING.get(name, name).partition(".")
    return name if namespace == "workbench" and name in HOST_COPIES else None


def is_async_launch(target: Any) -> bool:
    """Whether the operator starts something that has to be waited for: a collective, or a copy to or from the host."""
    collective = collective_kind(target) is not None and not blocks(target)
    return collective or host_copy(target) is not None


def waits(target: Any) -> bool:
    """Whether the operator waits for a collective, or for a copy to or from the host."""
    return is_wait(target) or op_name(target) in ("workbench.wait_copy", "ao.wait_tensor")


@functools.cache
def _arguments(target: Any) -> dict[str, int]:
    return {a.name: i for i, a in enumerate(target._schema.arguments)}


def argument(node: torch.fx.Node, name: str) -> Any:
    """The value of the operator node's argument called `name` in its schema, or None."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = _arguments(node.target).get(name)
    return node.args[position] if position is not None and position < len(node.args) else None


Places = tuple[tuple[int, str], ...]


@functools.cache
def _effects(target: Any) -> tuple[Places, Places]:
    """(arguments whose storage the result shares, arguments written to), as (position, name), by the schema."""
    if not isinstance(target, torch._ops.OpOverload):
        return (), ()
    schema = target._schema
    results = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
    shared: set[str] = set().union(*results)
    marked = [(i, a.name, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info]
    aliased = tuple(
        (i, name) for i, name, info in marked if info.before_set & shared or "*" in info.after_set
    )
    if op_name(target) == "aten._unsafe_view" or is_wait(target):
        aliased = ((0, schema.arguments[0].name),)
    return aliased, tuple((i, name) for i, name, info in marked if info.is_write)


def _nodes_at(node: torch.fx.Node, places: Places) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []
    for position, name in places:
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        if isinstance(value, torch.fx.Node):
            nodes.append(value)
        elif isinstance(value, list | tuple):
            nodes += [v for v in value if isinstance(v, torch.fx.Node)]
    return nodes


def aliased_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The inputs whose storage this node's result shares: of views, waits, in-place operators, and list items.

    `getitem` of a list of new tensors counts as sharing with the list's node, which stands for all items.
    """
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        # a compiled region returns independent tensors
        return [a for a in node.all_input_nodes if COMPILED_REGION not in a.meta]
    aliased = _nodes_at(node, _effects(node.target)[0])
    if aliased and op_name(node.target) in _MAYBE_COPIES:
        copied = storage_key(node.meta.get("val")) != storage_key(aliased[0].meta.get("val"))
        return [] if copied else aliased
    return aliased


def written_inputs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The input nodes that this node writes to."""
    return _nodes_at(node, _effects(node.target)[1]) if node.op == "call_function" else []


def calls_of(graph: torch.fx.Graph, wanted: Callable[[Any], bool]) -> list[torch.fx.Node]:
    """The nodes whose operator satisfies `wanted`, in node order, from the graph's index by operator."""
    table = graph._find_nodes_lookup_table.table
    calls = (nodes for (op, target), nodes in table.items() if op == "call_function" and wanted(target))
    return sorted(itertools.chain.from_iterable(calls))


def writes(target: Any) -> bool:
    """Whether the operator writes to one of its arguments."""
    return bool(_effects(target)[1])


def may_be_random(target: Any) -> bool:
    """Whether the operator's result may depend on the random generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_random(node: torch.fx.Node) -> bool:
    """Whether the node's result depends on the random generator. Attention without dropout does not."""
    if not may_be_random(node.target):
        return False
    return "dropout_p" not in _arguments(node.target) or bool(argument(node, "dropout_p"))


def storage_key(value: Any) -> int | None:
    """A key that two living tensors share exactly when they share storage; None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    return StorageWeakRef(value.untyped_storage()).cdata


def hint(size: Any) -> int:
    """A size as int: the hint of a symbolic one, without a new guard, else its expected value, else 0."""
    if isinstance(size, int):
        return size
    node = getattr(size, "node", None)
    value = getattr(node, "hint", None) if node is not None else None
    if value is None and node is not None:
        value = node.expr.subs(getattr(node.shape_env, EXPECTED, {}))
        value = value if value.is_number else None
    return int(value) if value is not None else 0


def with_hints(value: Any) -> Any:
    """The value, with hints in place of symbolic sizes; such a tensor becomes a new one on the meta device."""
    if isinstance(value, list | tuple):
        return type(value)(map(with_hints, value))
    if not is_symbolic(value):
        return value
    if not isinstance(value, torch.Tensor):
        return hint(value)
    return torch.empty([hint(s) for s in value.shape], dtype=value.dtype, device="meta")


EXPECTED = "expected_size"
"""Key of the annotation with the value that a user expects of a size read from a tensor."""


def keep_expected_sizes(graph: torch.fx.GraphModule) -> None:
    """Tell `hint` the values that the model expects of the sizes read during a step."""
    for node in graph.graph.nodes:
        expected, size = (node.meta.get("custom") or {}).get(EXPECTED), node.meta.get("val")
        if expected is not None and isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            env = size.node.shape_env
            setattr(env, EXPECTED, getattr(env, EXPECTED, {}) | {size.node.expr: expected})


def is_symbolic(value: Any) -> bool:
    """Whether a value is a size known only during a step, or a tensor, or list with one, of such a size."""
    if isinstance(value, list | tuple):
        return any(map(is_symbolic, value))
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, torch.SymInt)


def tensor_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor, or of all tensors of a list; 0 for other values."""
    if isinstance(value, torch.Tensor):
        return hint(value.numel()) * value.dtype.itemsize
    return sum(map(tensor_bytes, value)) if isinstance(value, list | tuple) else 0


def own_bytes(node: torch.fx.Node) -> int:
    """Bytes of a node's result on the device, if it aliases nothing: 0 for a copy on the host.

    Those of a compiled region belong to its items.
    """
    return 0 if COMPILED_REGION in node.meta or on_host(node) else tensor_bytes(node.meta.get("val"))


def on_host(node: torch.fx.Node) -> bool:
    """Whether a value is a copy on the host, or an input that the graph copies to the device."""
    return host_copy(node.target) == "to_host" or (
        node.op == "placeholder"
        and any(host_copy(user.target) == "to_device" for user in node.users)
    )


def group_name_of(node: torch.fx.Node) -> str:
    """The name of a collective node's process group, which may be given as a node."""
    value = argument(node, "group_name")
    if isinstance(value, torch.fx.Node):
        value = value.meta["val"].group_name
    return str(value)


def group_ranks(name: str) -> tuple[int, ...] | None:
    """The global ranks of a process group, by its name; None if this process has no such group."""
    if not dist.is_initialized():
        return None
    try:
        return tuple(dist.get_process_group_ranks(distributed_c10d._resolve_process_group(name)))  # type: ignore[arg-type]
    except (RuntimeError, ValueError, KeyError, AssertionError):
        return None


def world_kind() -> str | None:
    """The default group's backend name (`fake`, `gloo`, `nccl`), or None without one."""
    return str(dist.get_backend()) if dist.is_initialized() else None


def is_fake(value: Any) -> bool:
    """Whether a value is a tensor without values: fake, meta, or a subclass that wraps one."""
    if not isinstance(value, torch.Tensor):
        return False
    inner = getattr(value, "_local_tensor", value)
    return isinstance(inner, FakeTensor) or inner.device.type == "meta"


def short_name(node: torch.fx.Node) -> str:
    """`mm` for a node that calls `aten.mm.default`; the name of a plain function."""
    return op_name(node.target).rpartition(".")[2]
