"""Call torch's pass, complete the nodes that it adds, and count what it took and what it left."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.make_nodes import NodeMaker, fake_mode_of, origin_of, refresh_views
from workbench.graph.read.collectives import Collective, list_collectives
from workbench.graph.read.nodes import kind_of, reachable
from workbench.lab.async_tensor_parallel.torch_api import KINDS, fuse_with_products
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import Options
from workbench.torch_api.distributed import symmetric_memory
from workbench.torch_api.ops import calls_of, multiplies, op_name, tensor_bytes

_MOVES = ("view", "copy", "wait", "bookkeeping")
_NEEDS = "the operators need GPUs that read each other's memory"
_TAKES = (
    "torch's pass takes gathers whose products read them as first factor between two views, and scatters of one "
    "product that nothing else reads; list graph_cleanup after it"
)


def eligible(gm: GraphModule) -> list[Collective]:
    """The all-gathers of the tp axis that products read, and the reduce-scatters of products or sums of them."""
    nodes = {node.name: node for node in gm.graph.nodes}
    return [c for c in _on_tp(gm) if c.kind in ("all_gather", "reduce_scatter") and not multiplies(nodes[c.node].target)
            and _beside_product(nodes[c.node], c.kind)]


def _on_tp(gm: GraphModule) -> list[Collective]:
    return [c for c in list_collectives(gm) if c.axis == "tp"]


def _beside_product(start: Node, kind: str) -> bool:
    """Whether a product follows an all-gather, or precedes a reduce-scatter, with nothing but moves and sums between.
    """
    def near(node: Node) -> list[Node]:
        around = node.users if kind == "all_gather" else node.all_input_nodes
        return [n for n in around if n.op == "call_function"]

    def moved(node: Node) -> list[Node]:
        return [n for n in near(node) if kind_of(n) in _MOVES or op_name(n.target) == "aten.add"]

    return any(kind_of(n) == "matmul" for node in reachable([start], moved) for n in near(node))


def fused_with_products(before: Graphs, after: Graphs, options: Options) -> Effect:
    """Of the collectives that have products beside them, those that share an operator with them."""
    beside = sum(len(eligible(gm)) for gm in before)
    fused = sum(len(calls_of(gm.graph, multiplies)) for gm in after)
    evidence = {"fused": fused, "eligible": beside,
                "without_a_product": sum(len(_on_tp(gm)) for gm in before) - beside}
    if not any(_on_tp(gm) for gm in before):
        return Effect(
            False, "no collective runs over the tp axis: set mesh.tp to 2 or more", evidence
        )
    said = f"{fused} of {beside} collectives beside products share an operator with them"
    world = facts_of(before[0]).world
    if world == "fake":
        return Effect(
            None if fused else False, f"{said}; {_NEEDS}, and a fake world has none", evidence
        )
    if world != "nccl":
        ranks = "CPUs over gloo" if world == "gloo" else f"{world}, in one process"
        return Effect(False, f"{said}: {_NEEDS}, and these ranks run on {ranks}", evidence)
    if not fused and (lacking := _lacking(before)):
        return Effect(False, f"{said}: {lacking}", evidence)
    return Effect(fused > 0, f"{said}: {_TAKES}" if fused < beside or not fused else "", evidence)


def _groups(graphs: Graphs) -> list[str]:
    return sorted({c.group for gm in graphs for c in eligible(gm)})


def _lacking(graphs: Graphs) -> str:
    """What the machine lacks for the groups of the tp axis; every rank calls it."""
    return next(filter(None, map(symmetric_memory.missing_for, _groups(graphs))), "")


@register_pass("async_tensor_parallel", effect=fused_with_products)
def async_tensor_parallel(
    gm: GraphModule, example_inputs: list[Any], *, options: Options
) -> GraphModule:
    """torch's pass on the tp axis, where the ranks are GPUs that read each other's memory, or fake."""
    world = facts_of(gm).world
    if world not in ("nccl", "fake") or (world == "nccl" and _lacking((gm,))):
        return gm
    for group in _groups((gm,)):
        fuse(gm, group, world == "nccl")
        if world == "nccl":
            sizes = [_workspace(node) for node in calls_of(gm.graph, multiplies)]
            symmetric_memory.reserve(group, max(sizes, default=0))
    return gm


def fuse(gm: GraphModule, group: str, on_gpus: bool) -> None:
    """torch's pass on one group's collectives, in place. Results are contiguous, as what they stand for was."""
    for kind in KINDS:
        complete(gm, fuse_with_products(gm, group, kind, on_gpus))
    gm.graph.lint()
    gm.recompile()


def complete(gm: GraphModule, replaced: Mapping[str, Node]) -> None:
    """Give new nodes values and origins. replaced: by a new node's name, the node in whose place it stands."""
    mode = fake_mode_of(gm)
    added = [n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    origins = dict[Node, Node]()
    for node in reversed(added):
        origins[node] = replaced.get(node.name) or origins[next(iter(node.users))]
    for node in added:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode or nullcontext():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta = origin_of(origins[node]) | {"val": value}
        if node.name in replaced and not value.is_contiguous():
            make = NodeMaker(gm.graph, node.next, mode, node)
            copy = make(torch.ops.aten.clone.default, node, memory_format=torch.contiguous_format)
            node.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
    refresh_views(gm, set(added))


def _workspace(node: Node) -> int:
    """Bytes of symmetric memory that the operator needs on each rank: torch's own requirement."""
    if op_name(node.target).startswith("symm_mem.fused_all_gather"):
        return tensor_bytes(node.all_input_nodes[0].meta["val"])
    return 2 * tensor_bytes(node.meta["val"])
