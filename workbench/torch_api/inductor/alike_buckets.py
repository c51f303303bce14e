"""Buckets of alike tensors are traced once: the copies get values of their own.

Source: torch/_inductor/fx_passes/bucketing.py, which traces a small graph for each bucket with `_trace`, copies its
nodes into the graph, and says on each of them, with `_populate_node_meta`, which nodes it stands for.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from workbench.torch_api import stamping
from workbench.torch_api.ops import is_symbolic


@contextlib.contextmanager
def alike_traced_once() -> Iterator[None]:
    """Within, torch's bucketing traces one of the buckets that get the same function and alike inputs."""
    from torch._inductor.fx_passes import bucketing

    trace, tell = bucketing._trace, bucketing._populate_node_meta
    known: dict[Hashable, tuple[GraphModule, Sequence[Any]]] = {}

    def traced(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
        key = _key(function, inputs)
        if key in known:
            graph, before = known[key]
            _give_own_values(graph, before, inputs)  # torch has copied the nodes of the bucket before
        else:
            graph = trace(function, inputs)
        if key is not None:
            known[key] = graph, inputs
        return graph

    def told(bucket: list[Node], made: list[Node]) -> None:
        """What stands on every node of a bucket is found out once."""
        one: Any = types.SimpleNamespace(meta={})
        tell(bucket, [one])
        for node in made:
            node.meta.update({k: v.copy() if hasattr(v, "copy") else v for k, v in one.meta.items()})

    with mock.patch.object(bucketing, "_trace", traced), mock.patch.object(bucketing, "_populate_node_meta", told):
        yield


def _storages(inputs: Sequence[Any]) -> list[stamping.Storage]:
    return stamping.storages(list(inputs))


def _key(function: Any, inputs: Sequence[Any]) -> Hashable:
    """Equal where a trace gives the same graph; None where that is not known."""
    leaves, spec = pytree.tree_flatten(list(inputs))
    if is_symbolic(leaves):
        return None
    first: dict[int, int] = {}
    shared = [first.setdefault(stamping.key_of_storage(s), i) for i, s in enumerate(_storages(inputs))]
    return (function, str(spec), tuple(shared), *(
        (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor) else x for x in leaves))


def _give_own_values(graph: GraphModule, before: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Values in new memory, shared among themselves and with `inputs` as they were with the inputs `before`."""
    had = map(stamping.key_of_storage, _storages(before))
    memory = dict(zip(had, _storages(inputs), strict=True))
    for node in graph.graph.nodes:
        if have := stamping.storages(value := node.meta.get("val")):
            for storage in have:
                memory.setdefault(stamping.key_of_storage(storage), stamping.new_storage(storage))
            given = [memory[stamping.key_of_storage(storage)] for storage in have]
            node.meta["val"] = stamping.with_storages(value, given)
