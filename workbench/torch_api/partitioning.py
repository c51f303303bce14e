"""torch's partitioners, and the compile of a joint graph around them with both bodies left open.

Source: torch/_functorch/partitioners.py, torch/_functorch/aot_autograd.py (`aot_compile_joint_with_descriptors`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import networkx
import torch
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors
from torch._logging._internal import log_state, trace_log
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from workbench.torch_api.aot import LateBound, put
from workbench.torch_api.min_cut import minimum_cut
from workbench.torch_api.ops import draws

PARTITIONERS: dict[str, Callable[..., tuple[GraphModule, GraphModule]]] = {
    "min_cut": partitioners.min_cut_rematerialization_partition,
    "default": partitioners.default_partition,
}


def compile_joint(joint: Any, by: str = "min_cut") -> tuple[Callable[..., Any], LateBound, LateBound]:
    """Partition with one of PARTITIONERS and wrap in autograd, leaving both bodies open.

    torch's own choice here is `default_partition`, which saves views of gathered weights.
    """
    found: dict[str, LateBound] = {}

    def callback(name: str) -> Callable[..., LateBound]:
        def compiler(graph: GraphModule, example_inputs: list[Any]) -> LateBound:
            found[name] = LateBound(graph, example_inputs)
            return found[name]

        return compiler

    with settings(), _without_texts(joint):
        function = aot_compile_joint_with_descriptors(
            joint,
            partition_fn=PARTITIONERS[by],
            fw_compiler=callback("forward"),
            bw_compiler=callback("backward"),
        )
    return function, found["forward"], found["backward"]


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """What a call of a partitioner needs here: one decision that torch takes otherwise, and the same work in less time.

    torch goes by the operator's tag, and would thread the generator's state through attention without dropout; on 2.13
    the state lands behind the saved meshes, where the runtime does not look for tensors.
    """
    with (mock.patch.object(partitioners, "has_recomputable_rng_ops", recomputes_draws),
          mock.patch.object(*_CUT, minimum_cut),
          mock.patch.object(Graph, "node_copy", _node_copy),
          mock.patch.object(partitioners, "reordering_to_mimic_autograd_engine", _reordered)):
        yield


# 2.15 has a wrapper around networkx's function, by its name
_CUT = partitioners if hasattr(partitioners, "minimum_cut") else networkx, "minimum_cut"
_COPY, _REORDER = Graph.node_copy, partitioners.reordering_to_mimic_autograd_engine


def _node_copy(graph: Graph, node: Node, arg_transform: Callable[[Node], Any] = lambda n: n) -> Node:
    """`Graph.node_copy` without the search of its arguments for raw sizes: the copied node has passed it."""
    if graph.owning_module is not None:  # which may want to hear of it
        return _COPY(graph, node, arg_transform)
    args, kwargs = (torch.fx.node.map_arg(given, arg_transform) for given in (node.args, node.kwargs))
    return put(graph, node, graph._graph_namespace.create_name(node.name, None), args, kwargs, copy.copy(node.meta))


def _reordered(graph: GraphModule) -> GraphModule:
    """The backward in autograd's order; its code is written when it is first run, which torch left to us elsewhere."""
    with mock.patch.object(torch.fx, "GraphModule", _LazyGraphModule):
        return _REORDER(graph)


@contextlib.contextmanager
def _without_texts(joint: Any) -> Iterator[None]:
    """Graphs are not written as text and code while nobody reads it, neither torch's logs nor a run: a third of the
    time. A lazy graph module writes its code when it is first run.
    """
    read = bool(trace_log.handlers) or any(map(log_state.is_artifact_enabled, ("aot_joint_graph", "aot_graphs")))
    config = dataclasses.replace(joint._aot_state.aot_config, enable_log=read)
    with mock.patch.object(joint._aot_state, "aot_config", config), _use_lazy_graph_module(True):
        yield


def recomputes_draws(graph: GraphModule) -> bool:
    """Whether something that draws random numbers is to be run again in the backward."""
    return any(partitioners.must_recompute(n) and draws(n) for n in graph.graph.nodes)
