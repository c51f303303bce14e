"""Buckets of alike tensors are traced once: the copies get values of their own.

Source: torch/_inductor/fx_passes/bucketing.py, which traces a small graph for each bucket with `_trace`, copies its
nodes into the graph, and says on each of them which nodes it stands for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._guards import detect_fake_mode
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from workbench.torch_api import aot, stamping
from workbench.torch_api.ops import is_symbolic


@contextlib.contextmanager
def alike_traced_once() -> Iterator[None]:
    """Within, torch's bucketing traces one of the buckets that get the same function and alike inputs."""
    from torch._inductor.fx_passes import bucketing

    trace, source = bucketing._trace, bucketing.NodeSource
    known: dict[Hashable, tuple[GraphModule, Sequence[Any]]] = {}
    sources: dict[Hashable, Any] = {}

    def traced(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
        key = _key(function, inputs)
        if key in known:
            graph, before = known[key]
            had = map(stamping.key_of_storage, _storages(before))
            return _with_own_values(graph, dict(zip(had, _storages(inputs), strict=True)))
        mode = detect_fake_mode(inputs)
        with mock.patch.object(mode, "cache_enabled", True):  # off since Dynamo's capture
            graph = trace(function, inputs)
        if key is not None:
            known[key] = graph, inputs
        return graph

    def once(node: Any, *rest: Any) -> Any:
        """One record for a replaced node, which is told of each new node of its bucket."""
        key = node, str(rest)
        if key not in sources:
            sources[key] = source(node, *rest)
        return sources[key]

    with mock.patch.object(bucketing, "_trace", traced), mock.patch.object(bucketing, "NodeSource", once):
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


def _with_own_values(graph: GraphModule, memory: dict[int, stamping.Storage]) -> GraphModule:
    """A copy whose values share memory among themselves, and with its own inputs, as those of `graph` do."""
    copied = aot.clone(graph)
    for node in copied.graph.nodes:
        if have := stamping.storages(value := node.meta.get("val")):
            for storage in have:
                memory.setdefault(stamping.key_of_storage(storage), stamping.new_storage(storage))
            given = [memory[stamping.key_of_storage(storage)] for storage in have]
            node.meta["val"] = stamping.with_storages(value, given)
    return copied
