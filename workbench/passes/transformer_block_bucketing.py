"""transformer_block_bucketing: many small collectives become few large ones, one bucket for each named module.

    >>> example("transformer_block_bucketing", lambda x, weight: x @ weight, layers=2, ranks=2,
    ...         buckets=[["layers.0", "layers.1"]])
    before:
      ...
      all_gather_into_tensor: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_1, 2, '0')  # layers.0
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      ...
    after:
      ...
      _pre_bucket_all_gather: float32 [32] = bucketing._pre_bucket_all_gather([view_1, view_4], 2, ...)  # layers.0
      slice_1: float32 [16] = aten.slice.Tensor(_pre_bucket_all_gather, 0, 0, 16)  # layers.0
      all_gather_into_tensor_out: float32 [32] = _c10d_functional.all_gather_into_tensor_out(slice_1, 2, ...
      wait_tensor_2: float32 [32] = _c10d_functional.wait_tensor(all_gather_into_tensor_out)  # layers.0
      view_6: float32 [2, 16] = aten.view(wait_tensor_2, [2, -1])  # layers.0
      split_with_sizes: float32 [2, 8], float32 [2, 8] = aten.split_with_sizes(view_6, [8, 8], 1)  # layers.0
      ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.memory import parameter_gathers
from workbench.passes.effect import Effect
from workbench.passes.merged_collectives import launches_saved, without_region
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.devices.estimators import device_specs
from workbench.torch_api.inductor import bucketing
from workbench.torch_api.module_paths import clean_path


class BlockBucketingOptions(Options):
    """buckets: module paths, or lists of them, by default the model's blocks. separate_gather_group: all-gathers get a
    process group of their own, so that they can overlap with reduce-scatters.
    """

    buckets: tuple[str | tuple[str, ...], ...] = ()
    separate_gather_group: bool = True


_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


def module_stack(node: Node) -> list[tuple[str, type]]:
    """The modules around a node, outermost first: clean path and class; a backward node has its forward's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(clean_path(path), kind) for path, kind in stack.values()]


def fewer_launches(before: Graphs, after: Graphs, options: BlockBucketingOptions) -> Effect:
    """Fewer all-gathers and reduce-scatters than before, over forward and backward; says what a plan left out."""
    found = launches_saved(before, after, options)
    return replace(found, reason=_left_out(before, options) if found.happened else
                   _unknown_buckets(before, options) or found.reason)


def _planned(buckets: Iterable[Sequence[str] | str]) -> list[str]:
    """Every module path of the buckets."""
    return [path for bucket in buckets for path in ([bucket] if isinstance(bucket, str) else bucket)]


def _plan(gm: GraphModule, options: BlockBucketingOptions) -> list[list[str] | str]:
    """The buckets of the options, or else the model's own."""
    given = options.buckets or facts_of(gm).buckets
    return [bucket if isinstance(bucket, str) else list(bucket) for bucket in given]


def _paths(graphs: Graphs) -> set[str]:
    return {path for g in graphs for n in g.graph.nodes for path, _ in module_stack(n)}


def _left_out(graphs: Graphs, options: BlockBucketingOptions) -> str:
    """The paths that match no module, and the gathered parameters that no bucket takes; "" where there are none."""
    planned = set(_planned(_plan(graphs[0], options)))
    gathers = {n for _, chain in gather_chains(graphs[0]) for n in chain if n.target is _GATHER}
    stacks = [module_stack(n) for n in graphs[0].graph.nodes if n in gathers]
    said = []
    if unknown := planned - {path for stack in stacks for path, _ in stack} and planned - _paths(graphs):
        said.append(f"no module path matches {', '.join(sorted(unknown))}")
    if alone := [stack[-1][0] or "the root" for stack in stacks if stack and not planned & {path for path, _ in stack}]:
        said.append(f"{len(alone)} of {len(stacks)} gathers of the forward are in no bucket, the first in {alone[0]}")
    return "; ".join(said)


def _unknown_buckets(graphs: Graphs, options: BlockBucketingOptions) -> str:
    """Says so where parameters are gathered and no bucket names a module; else ""."""
    if not any(True for graph in graphs for _ in gather_chains(graph)):
        return ""
    paths, names = _paths(graphs), _planned(_plan(graphs[0], options))
    if any(name in paths for name in names):
        return ""
    return (f"no module path matches the buckets {names[:3]}: "
            f"the graph's paths are {', '.join(sorted(paths)[:3]) or 'none at all'}")


def _separate_gathers(gm: GraphModule) -> None:
    facts = facts_of(gm)
    twins = facts.step.gather_groups  # the same twins in forward and backward
    axes = {group: axis for axis, group in facts.groups.items()}
    for _, chain in gather_chains(gm):
        for node in chain:
            if node.target is _GATHER:
                name = str(node.args[2])
                if name not in twins:
                    twins[name] = bucketing.twin_group(name)
                twin = twins[name]
                facts.groups[f"{axes.get(name, name)}.gather"] = twin
                facts.group_sizes[twin] = facts.group_sizes.get(name) or int(node.args[1])  # type: ignore[arg-type]
                node.args = (node.args[0], node.args[1], twin)
    gm.recompile()


def _refuse_overlap(buckets: list[list[str] | str]) -> None:
    """A module in two buckets is an error here. torch would only count the nodes that both claim."""
    paths = _planned(buckets)
    for i, path in enumerate(paths):
        inner = next((other for j, other in enumerate(paths) if j != i and f"{other}.".startswith(f"{path}.")), None)
        if inner is not None:
            raise WorkbenchError(f"transformer_block_bucketing: the buckets name {path!r} and, within it, {inner!r}: "
                                 "a module is in one bucket, so leave out one of the two")


@register_pass(
    "transformer_block_bucketing", stage="partitioned", numerics="reduction_order",
    changes="one all-gather and one reduce-scatter a bucket, the same bytes",
    options=BlockBucketingOptions, conflicts={"autobucketing_reordering"}, needs={"fsdp"},
    effect=fewer_launches,
    source="torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing",
)
def transformer_block_bucketing(
    gm: GraphModule, example_inputs: list[Any], *, options: BlockBucketingOptions
) -> GraphModule:
    """Bucket by module: `buckets` are module paths, or lists of them; by default the model's blocks.

    All-gathers move to a process group of their own first, so that they can overlap with reduce-scatters.
    """
    buckets = _plan(gm, options)
    if not buckets:
        raise WorkbenchError("transformer_block_bucketing: the model names no blocks: state options.buckets")
    _refuse_overlap(buckets)
    if options.separate_gather_group:
        _separate_gathers(gm)
    names = {node.name for node in gm.graph.nodes}
    with device_specs("h100"):  # the scheduler asks for a device's figures and uses none of them
        gathers = set(parameter_gathers(gm))
        return without_region(bucketing.bucket_by_module(gm, list(buckets), module_stack, gathers), names)
