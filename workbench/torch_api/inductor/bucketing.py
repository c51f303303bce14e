"""Inductor's bucketing schedulers, the times that they are given, and their process groups, in all versions of torch.

Source: torch/_inductor/fx_passes/overlap_manual_scheduling.py and overlap_scheduling.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import GraphModule, Node

from workbench.torch_api.aot import accepted
from workbench.torch_api.ops import collective_kind

Milliseconds = Callable[[Node, int | None], float]
"""Of a node, or of a collective of so many bytes in place of its own; equal on every rank."""
# Keyed by the group itself: a later world may give another group the same name.
_TWINS: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def bucket_by_module(
    gm: GraphModule,
    buckets: Sequence[list[str]],
    module_stack: Callable[[Node], list[tuple[str, type]]],
    gathers: Collection[Node] = (),
) -> GraphModule:
    """Merge the all-gathers and the reduce-scatters of each bucket of module paths into one each, in place.

    gathers: all-gathers of parameters. torch knows those that depend on one input of the graph; a scale that the
    weights of all layers share makes a gather depend on more.

    All-reduces count as outside of every module. torch 2.14 would bucket those of a module too, and delays what reads
    them as if they were gradients: those of tensor parallelism would then come after their readers.
    """
    from torch._inductor.fx_passes import overlap_manual_scheduling as scheduling

    torchs_rule = scheduling.is_fsdp_all_gather

    def of_parameter(node: Node, *ancestors: Any) -> bool:
        return node in gathers or bool(torchs_rule(node, *ancestors))

    def modules(node: Node) -> list[tuple[str, type]]:
        return [] if collective_kind(node.target) == "all_reduce" else module_stack(node)

    names = {node.name for node in gm.graph.nodes}
    with mock.patch.object(scheduling, "is_fsdp_all_gather", of_parameter):
        gm = scheduling.manual_overlap_bucketing(
            gm, list(buckets), insert_overlap_deps=False, module_stack_fn=modules)
    return _without_region(gm, names)


def bucket_by_cost(gm: GraphModule, ms: Callable[[Node, int | None], float]) -> GraphModule:
    """Bucket and reorder collectives by the times of nodes, inside `scheduler_times`."""
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    keywords = accepted(schedule_overlap_bucketing, {
        "collective_bucketing": True, "insert_overlap_deps": False, "collective_estimator": "analytical",
        "compute_estimator": "analytical", "pre_bucketing_fsdp_collectives": False,
        "custom_runtime_estimation": ms})
    names = {node.name for node in gm.graph.nodes}
    return _without_region(schedule_overlap_bucketing(gm, **keywords), names)


def _without_region(gm: GraphModule, names: set[str]) -> GraphModule:
    """Nodes that are not in `names` leave their region: they serve several modules, with the metadata of one."""
    for node in gm.graph.nodes:
        if node.name not in names:
            node.meta.pop("custom", None)
    return gm


def twin_group(name: str) -> str:
    """A second process group over the same ranks as group `name`; every rank of that group must call this.

    Collectives of one group run one after another; with two groups, gathers and scatters can overlap. A group keeps one
    twin, however often a step is built on it, until the world ends.
    """
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    if group not in _TWINS:
        ranks, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
        _TWINS[group] = dist.new_group(
            ranks, backend=backend, use_local_synchronization=True
        ).group_name
    return _TWINS[group]


@contextmanager
def scheduler_times(ms: Milliseconds) -> Iterator[Milliseconds]:
    """Inside, torch's schedulers estimate and measure nothing. Give `ms` as `custom_runtime_estimation`, too.

    Beside that hook they look for the machine's own GPU: torch 2.13 for estimates that the hook's replace, 2.11 to
    measure each matmul, whose times the ranks then exchange.
    """
    # on first use: these imports take a second
    overlap: Any = import_module("torch._inductor.fx_passes.overlap_scheduling")
    runtimes: Any = import_module("torch._inductor.fx_passes.node_runtime_estimation")

    def of_node(node: Node, *_: Any) -> float:
        return ms(node, None)

    replaced = (
        (overlap, "estimate_roofline_runtime_ms", of_node),
        (overlap, "estimate_runtime_analytical", of_node),
        (overlap, "benchmark_node_with_cache_key", lambda node, *_: (of_node(node), None)),
        (overlap.OverlapScheduler,
         "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks", lambda _: None),
        # a table for TORCH_TRACE; torch 2.12 fails to count the FLOP of sizes that a step decides
        (runtimes, "_log_compute_estimations", lambda *_: None),
    )
    with ExitStack() as stack:
        for place, name, function in replaced:
            if hasattr(place, name):
                stack.enter_context(patch.object(place, name, function))
        yield ms
