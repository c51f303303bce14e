"""torch's bucketing in less time, with the same result; `faster` is the one hook.

Alike buckets are traced once, and copies of the trace get values of their own. Operators run once on equal fake values,
and tables that nobody reads are not made.

Source: torch/_inductor/fx_passes/bucketing.py. It traces a small graph for each bucket with `_trace`, copies its nodes
into the graph, and with `_populate_node_meta` records on each of them the nodes that it replaces.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from workbench.torch_api import stamping
from workbench.torch_api.distributed.fake import cached
from workbench.torch_api.ops import is_symbolic, key_of_storage


@contextlib.contextmanager
def faster(graph: Graph, *, by_module: bool = False) -> Iterator[None]:
    """Inside, torch buckets the graph's collectives in less time. by_module: not by cost, which needs the estimates."""
    with _without_unread_tables(by_module), _alike_traced_once(), cached(graph):
        yield


@contextlib.contextmanager
def _alike_traced_once() -> Iterator[None]:
    """Inside, torch's bucketing traces one bucket of those with the same function and alike inputs."""
    from torch._inductor.fx_passes import bucketing

    trace, record = bucketing._trace, bucketing._populate_node_meta
    known: dict[Hashable, tuple[GraphModule, Sequence[Any]]] = {}

    def traced(function: Callable[..., Any], inputs: Sequence[Any]) -> GraphModule:
        key = _key(function, inputs)
        if key in known:
            graph, before = known[key]
            _give_own_values(graph, before, inputs)  # torch has already copied the nodes for the previous bucket
        else:
            graph = trace(function, inputs)
        if key is not None:
            known[key] = graph, inputs
        return graph

    def recorded(bucket: list[Node], made: list[Node]) -> None:
        """The metadata that all nodes of a bucket share is computed once."""
        one: Any = types.SimpleNamespace(meta={})
        record(bucket, [one])
        for node in made:
            node.meta.update({k: v.copy() if hasattr(v, "copy") else v for k, v in one.meta.items()})

    with mock.patch.object(bucketing, "_trace", traced), mock.patch.object(bucketing, "_populate_node_meta", recorded):
        yield


def _storages(inputs: Sequence[Any]) -> list[stamping.Storage]:
    return stamping.storages(list(inputs))


def _key(function: Any, inputs: Sequence[Any]) -> Hashable:
    """Equal keys mean equal traces; None where that is unknown."""
    leaves, spec = pytree.tree_flatten(list(inputs))
    if is_symbolic(leaves):
        return None
    first: dict[int, int] = {}
    shared = [first.setdefault(key_of_storage(s), i) for i, s in enumerate(_storages(inputs))]
    return (function, str(spec), tuple(shared), *(
        (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.dtype, x.device, x.requires_grad)
        if isinstance(x, torch.Tensor) else x for x in leaves))


def _give_own_values(graph: GraphModule, before: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Give the nodes values in new storages, which share memory with `inputs` as the old ones did with `before`."""
    had = map(key_of_storage, _storages(before))
    memory = dict(zip(had, _storages(inputs), strict=True))
    for node in graph.graph.nodes:
        if have := stamping.storages(value := node.meta.get("val")):
            for storage in have:
                memory.setdefault(key_of_storage(storage), stamping.new_storage(storage))
            given = [memory[key_of_storage(storage)] for storage in have]
            node.meta["val"] = stamping.with_storages(value, given)


@contextlib.contextmanager
def _without_unread_tables(by_module: bool) -> Iterator[None]:
    """No tables of estimates for TORCH_TRACE where it is off: torch runs each matmul on fake tensors to write them.

    That takes half of the time of bucketing by module, which uses no estimates. Bucketing by module also skips what the
    scheduler underneath computes to decide which compute hides which collective.
    """
    from torch._inductor.fx_passes import node_runtime_estimation, overlap_preserving_bucketer, overlap_scheduling

    unread: list[tuple[Any, str]] = []
    if not logging.getLogger("torch.__trace").handlers:
        unread.append((node_runtime_estimation, "_log_compute_estimations"))
        if by_module:
            unread.append((overlap_scheduling, "gather_node_runtime_estimations"))
    if by_module:
        unread += [(overlap_scheduling.OverlapScheduler, "_calculate_domination_index"),
                   (overlap_preserving_bucketer.OverlapPreservingBucketer, "build_timelines")]
    with contextlib.ExitStack() as patches:
        for owner, name in unread:
            if hasattr(owner, name):
                patches.enter_context(mock.patch.object(owner, name, lambda *_, **__: {}))
        yield
