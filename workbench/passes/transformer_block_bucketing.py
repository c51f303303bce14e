"""transformer_block_bucketing: many small collectives become few large ones, one bucket for each named module.

The idea in plain lines, without torch's scheduler: lessons/l05_bucket_and_overlap/bucket_by_hand.py.

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

from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.memory import parameter_gathers
from workbench.graph.read.nodes import blocks_of
from workbench.passes.effect import Effect
from workbench.passes.merged_collectives import launches_saved
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.inductor import bucketing
from workbench.torch_api.inductor.bucketing import scheduler_times
from workbench.torch_api.module_paths import clean_path, module_path
from workbench.torch_api.ops import argument, group_name_of

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default


class BlockBucketingOptions(Options):
    """buckets: module paths, or lists of them, by default the model's units or blocks.
    separate_gather_group: all-gathers get a process group of their own, so that they can overlap with reduce-scatters.
    """

    buckets: tuple[str | tuple[str, ...], ...] = ()
    separate_gather_group: bool = True


def module_stack(node: Node) -> list[tuple[str, type]]:
    """The modules around a node, outermost first: clean path and class; a backward node has its forward's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [(clean_path(path), kind) for path, kind in stack.values()]


def _module_paths(node: Node) -> set[str]:
    return {path for path, _ in module_stack(node)}


def _plan(gm: GraphModule, options: BlockBucketingOptions) -> list[list[str]]:
    """The buckets of the options, or else the model's, or its blocks: each a list of module paths."""
    buckets = options.buckets or facts_of(gm).buckets or blocks_of(gm)
    return [[bucket] if isinstance(bucket, str) else list(bucket) for bucket in buckets]


def fewer_launches(before: Graphs, after: Graphs, options: BlockBucketingOptions) -> Effect:
    """Fewer all-gathers and reduce-scatters than before, over forward and backward; says what a plan left out."""
    effect = launches_saved(before, after, options)
    gathers = _gathers_of_parameters(before[0])
    paths = {path for graph in before for node in graph.graph.nodes for path in _module_paths(node)}
    plan = [path for bucket in _plan(before[0], options) for path in bucket]
    unknown = [path for path in plan if path not in paths]
    if gathers and len(unknown) == len(plan):
        known = ", ".join(sorted(paths)[:3]) or "none at all"
        reason = f"no module path matches the buckets {unknown[:3]}: the graph's paths are {known}"
        return replace(effect, reason=reason)
    if not effect.happened:
        return effect
    reasons = [f"no module path matches {', '.join(sorted(unknown))}"] if unknown else []
    if alone := [node for node in gathers if not _module_paths(node) & set(plan)]:
        reasons.append(f"{len(alone)} of {len(gathers)} gathers of the forward are in no bucket, "
                       f"the first in {module_path(alone[0]) or 'the root'}")
    return replace(effect, reason="; ".join(reasons))


def _gathers_of_parameters(gm: GraphModule) -> list[Node]:
    """In node order."""
    nodes = {node for _, chain in gather_chains(gm) for node in chain}
    return sorted(node for node in nodes if node.target is _GATHER)


def _separate_gathers(gm: GraphModule) -> None:
    """Move the all-gathers of parameters to a second group over the same ranks."""
    facts = facts_of(gm)
    twins = facts.step.gather_groups  # the same twins in forward and backward
    axes = {group: axis for axis, group in facts.groups.items()}
    for node in _gathers_of_parameters(gm):
        name = group_name_of(node)
        if name not in twins:
            twins[name] = bucketing.twin_group(name)
        twin = twins[name]
        facts.groups[f"{axes.get(name, name)}.gather"] = twin
        facts.group_sizes[twin] = facts.group_sizes.get(name) or argument(node, "group_size")
        node.args = (*node.args[:2], twin)
    gm.recompile()


def _refuse_overlap(plan: list[list[str]]) -> None:
    """A module in two buckets is an error here. torch would only count the nodes that both claim."""
    for path, other in permutations([path for bucket in plan for path in bucket], 2):
        if f"{other}.".startswith(f"{path}."):
            raise WorkbenchError(
                f"transformer_block_bucketing: the buckets name {path!r} and, within it, {other!r}: "
                "a module is in one bucket, so leave out one of the two"
            )


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
    """Bucket by module: `buckets` are module paths, or lists of them; by default the units that the model was authored
    with, or else its outermost modules with a number, such as `blocks.0`.

    All-gathers move to a process group of their own first, so that they can overlap with reduce-scatters.
    """
    plan = _plan(gm, options)
    if not plan:
        raise WorkbenchError(
            "transformer_block_bucketing: no module path has a number: state options.buckets"
        )
    _refuse_overlap(plan)
    if options.separate_gather_group:
        _separate_gathers(gm)
    with scheduler_times(lambda *_: 0.0):  # torch asks for times, and uses none
        return bucketing.bucket_by_module(gm, plan, module_stack, set(parameter_gathers(gm)))
