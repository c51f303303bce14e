"""Inductor's bucketing schedulers and the process groups they run on, with per-version differences.

Source: torch/_inductor/fx_passes/overlap_manual_scheduling.py and overlap_scheduling.py.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.torch_api.distributed.fake import cached
from workbench.torch_api.inductor.alike_buckets import alike_traced_once
from workbench.torch_api.inductor.lowering import accepted

# By the group itself, since a later world may use the same name for another one.
_TWINS: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def bucket_by_module(
    gm: GraphModule, buckets: list[list[str] | str], module_stack: Callable[[Node], list[tuple[str, type]]]
) -> GraphModule:
    """One all-gather and one reduce-scatter for each bucket of module paths, in place."""
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    with _without_unread_tables(by_module=True), alike_traced_once(), cached(gm.graph):
        return manual_overlap_bucketing(gm, buckets, insert_overlap_deps=False, module_stack_fn=module_stack)


def bucket_by_cost(gm: GraphModule, keywords: dict[str, Any]) -> GraphModule:
    """Bucket and reorder collectives by estimated time; call it under `device_specs`.

    Raises WorkbenchError where this torch's scheduler cannot do what a keyword asks for.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    wanted = "pre_bucketing_fsdp_collectives"
    if keywords.get(wanted) and not accepted(schedule_overlap_bucketing, {wanted: True}):
        raise WorkbenchError(
            f"torch {torch.__version__} does not bucket FSDP's collectives by size (2.13 and later do): "
            "leave out the option bucket_cap_mb"
        )
    with _without_unread_tables(), alike_traced_once(), cached(gm.graph):
        return schedule_overlap_bucketing(gm, **accepted(schedule_overlap_bucketing, keywords))


@contextlib.contextmanager
def _without_unread_tables(*, by_module: bool = False) -> Iterator[None]:
    """No tables of estimates for TORCH_TRACE where it is not on: torch runs each matmul on fake tensors to write them.

    That is half of the time of bucketing by module, which uses no estimate, and none of what the scheduler that it
    stands on finds out to decide what hides what.
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


def group_ranks(name: str) -> list[int]:
    """The global ranks of a process group, given its name."""
    return dist.get_process_group_ranks(_resolve_process_group(name))  # type: ignore[arg-type]


def twin_group(name: str) -> str:
    """A second process group over the same ranks as group `name`; every rank of that group must call this.

    Collectives of one group run one after another: with two, gathers and scatters can overlap. A group has one
    twin, however often a step is built on it, and the twin goes with the world.
    """
    group = _resolve_process_group(name)  # type: ignore[arg-type]
    known = _TWINS.get(group)
    if known is not None:
        return known
    backend = dist.get_backend(group)
    twin = dist.new_group(dist.get_process_group_ranks(group), backend=backend, use_local_synchronization=True)
    _TWINS[group] = twin.group_name
    return twin.group_name
