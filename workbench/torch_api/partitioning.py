"""torch's partitioners, and the compilation of a joint graph around them with both bodies left open.

Source: torch/_functorch/partitioners.py, torch/_functorch/aot_autograd.py (`aot_compile_joint_with_descriptors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from workbench.torch_api.aot import LateBound, parameter_of, written_by
from workbench.torch_api.ops import aliased_inputs, is_random, is_wait

PARTITIONERS: dict[str, Callable[..., tuple[GraphModule, GraphModule]]] = {
    "min_cut": partitioners.min_cut_rematerialization_partition,
    "default": partitioners.default_partition,
}

_OPAQUE = "unsafe_treat_script_objects_as_zero_size"


RESHARD = "reshard_after_forward"
"""Key of the annotation of an adopted unit's gathers: whether the backward gathers again."""


def tag_gather(node: Node, reshard: bool) -> None:
    """Have the backward repeat a node of a gather, or be given what the forward has gathered."""
    if reshard:
        # a layer of its own, so that there is no boundary between the node and its reader
        node.meta["recompute"], node.meta["ac_graph_id"] = CheckpointPolicy.MUST_RECOMPUTE, 1_000_000
    elif is_wait(node.target):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def tag_units(graph: GraphModule) -> None:
    """What an adopted unit gathers, and views of it, as its `reshard_after_forward` says; a pass may tag otherwise."""
    wishes: dict[Node, bool | None] = {}
    for node in graph.graph.nodes:
        inherited = [wishes[viewed] for viewed in aliased_inputs(node)]
        custom = node.meta.get("custom") or {}
        wish = wishes[node] = custom.get(RESHARD, next(iter(inherited), None))
        if wish is not None and node.meta.get("partitioner_tag") != "is_backward":
            tag_gather(node, wish)


def compile_joint(
    joint: Any, by: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], LateBound, LateBound]:
    """Partition with one of PARTITIONERS and wrap the pair in autograd; both bodies stay open.

    options: as for `settings`. torch would use `default_partition` here, which saves views of gathered weights.
    """
    slots: dict[str, LateBound] = {}

    def compiler(part: str) -> Callable[..., LateBound]:
        def compile_nothing(graph: GraphModule, example_inputs: list[Any]) -> LateBound:
            slots[part] = LateBound(graph, example_inputs)
            return slots[part]

        return compile_nothing

    def cut(graph: GraphModule, *args: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        if by == "min_cut":
            save_old_values(graph)
        return PARTITIONERS[by](graph, *args, **options)

    with settings(options):
        function = aot_compile_joint_with_descriptors(
            joint,
            partition_fn=cut,
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
        )
    return function, slots["forward"], slots["backward"]


def cut(
    graph: GraphModule, results: int, options: Mapping[str, Any]
) -> tuple[GraphModule, GraphModule]:
    """The minimum cut of a joint graph, which is changed. results: the number of outputs that are no gradients.

    To save some of the inputs costs nothing, as in `compile_joint`. torch means the parameters and buffers, and takes
    the first inputs, as many as these are before each DTensor becomes a shard and a mesh.
    """
    save_old_values(graph)
    names = {parameter_of(node) for node in graph.graph.find_nodes(op="placeholder")} - {None}
    free = list(range(len(names)))
    with settings(options):
        return partitioners.min_cut_rematerialization_partition(
            graph, [], num_fwd_outputs=results, static_lifetime_input_indices=free)


def written_names(graph: GraphModule) -> list[str]:
    """The parameters and buffers whose new values are among the outputs of a graph."""
    descriptors = tree_leaves(graph.graph.output_node().meta.get("desc"))
    return [name for name in map(written_by, descriptors) if name]


def save_old_values(graph: GraphModule) -> None:
    """What the forward computes from a buffer that it writes is saved: the backward would read the new value.

    torch's minimum cut may save the buffer itself instead, and autograd then refuses the backward.
    """
    written = written_names(graph)
    todo = [
        node for node in graph.graph.find_nodes(op="placeholder") if parameter_of(node) in written
    ]
    while todo:
        for user in todo.pop().users:
            if user.op != "call_function" or user.meta.get("partitioner_tag") == "is_backward":
                continue
            if aliased_inputs(user):
                todo.append(user)
            elif isinstance(user.meta.get("val"), torch.Tensor):
                user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def settings(options: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Around each call of a partitioner: it asks `recomputes_draws` whether the backward draws random numbers again.

    torch decides that by the operator's tag, and would save the generator's state for attention without dropout. On
    2.13 that state follows the saved meshes, where the runtime expects no tensors.

    options: of torch._functorch.config, such as `activation_memory_budget`.
    """
    changed = dict(options)
    # a device mesh among the inputs holds no tensor
    if options and hasattr(functorch_config, _OPAQUE):
        changed[_OPAQUE] = True
    with (functorch_config.patch(changed),
          mock.patch.object(partitioners, "has_recomputable_rng_ops", recomputes_draws)):
        yield


def recomputes_draws(graph: GraphModule) -> bool:
    """Whether the backward recomputes an operator that draws random numbers."""
    return any(partitioners.must_recompute(n) and is_random(n) for n in graph.graph.nodes)
