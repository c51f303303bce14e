"""Memory of a graph in node order, and the peak of a step, both estimated before anything runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of
from workbench.graph.read.fused_cost import fusion_groups, traffic_of
from workbench.graph.read.memory import item_roots, roots, saved_tensors
from workbench.graph.read.nodes import module_path
from workbench.torch_api.aot import is_parameter, parameter_of
from workbench.torch_api.ops import own_bytes, short_name, tensor_bytes

_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS takes on a Hopper GPU, once in the forward's thread and once in the backward's. Source:
aten/src/ATen/cuda/CublasHandlePool.cpp."""
_BUFFERED = ("scatter", "index_put")
"""Inductor writes the results of these to memory, also in the middle of a fused kernel."""
Holders = tuple[tuple[str, int, str], ...]
"""(tensor, bytes, parameter or module) of the largest values alive at a peak."""


@dataclass(frozen=True)
class MemoryProfile:
    """Estimated bytes alive while each node runs, in node order, without workspaces and fragmentation.

    curve: bytes at each of `nodes`.
    """

    peak_bytes: int
    peak_node: str
    input_bytes: int
    holders: Holders
    curve: tuple[int, ...] = field(repr=False)
    nodes: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class StepPeak:
    """Bytes on one rank. resident: what lives across steps: parameters, two states of AdamW for each, and buffers.
    phase: the one with the peak.
    """

    bytes: int
    resident: int
    phase: str
    holders: Holders


def freed_by_graph(node: Node, backward: bool) -> bool:
    """Whether a graph frees this input after its last use: what is saved for a backward, and tangents."""
    return backward and not node.name.startswith("primals") and parameter_of(node) is None


def live_bytes(gm: GraphModule, holders: int = 8, *, fused: bool = False,
               keeps_saved: bool = False) -> MemoryProfile:
    """Peak memory of the graph's values, where each is freed after its last use.

    Inputs live until the end, except the saved tensors and tangents of a backward graph, which it frees unless
    `keeps_saved`. fused: as where a compiler follows, whose kernels write only what others read.
    """
    nodes = list(gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    unwritten = _fuse(gm, place) if fused else set()
    tensor = roots(gm)
    owner = item_roots(gm, tensor)
    backward = facts_of(gm).part == "backward" and not keeps_saved
    last: dict[Node, int] = {}
    for node in nodes:
        for used in (node, *node.all_input_nodes):
            last[owner[used]] = max(place[node], last.get(owner[used], 0))
    size = {node: 0 if node in unwritten else own_bytes(node) for node in last}
    for node in last:
        if tensor[node] is not node:  # an item: allocated with its tuple, and counted apart
            size[tensor[node]] -= size[node]
    inputs = {node for node in last if node.op in ("placeholder", "get_attr")}
    stays = {node for node in inputs if not freed_by_graph(node, backward)}
    grows, shrinks = [0] * len(nodes), [0] * len(nodes)
    for node, i in last.items():
        if node not in inputs:
            grows[place[tensor[node]]] += size[node]
        if node not in stays:
            shrinks[i] += size[node]
    now = start = sum(size[node] for node in inputs)
    curve = []
    for more, less in zip(grows, shrinks, strict=True):
        curve.append(now + more)
        now += more - less
    peak = max(curve, default=start)
    at = curve.index(peak) if curve else 0
    alive = [node for node in last if (node in inputs or place[tensor[node]] <= at)
             and (node in stays or last[node] >= at)]
    alive.sort(key=lambda node: -size[node])
    largest = tuple((node.name, size[node], parameter_of(node) or module_path(node))
                    for node in alive[:holders])
    return MemoryProfile(peak, nodes[at].name if nodes else "", start, largest, tuple(curve),
                         tuple(node.name for node in nodes))


def _fuse(gm: GraphModule, place: dict[Node, int]) -> set[Node]:
    """The nodes that a compiler would not write to memory; `place` becomes where each node's kernel runs.

    A kernel runs at its last node, or at the first reader of a result.
    """
    unwritten = set[Node]()
    runs_at: dict[Node, int] = {}
    for group in fusion_groups(gm):
        inside, written = set(group), traffic_of(group).writes
        for node in group:
            if node.name not in written and not short_name(node).startswith(_BUFFERED):
                unwritten.add(node)
            readers = [place[user] for user in node.users if user not in inside]
            runs_at[node] = min([place[group[-1]], *readers])
    place |= runs_at
    return unwritten


def estimated_bytes(*graphs: GraphModule) -> dict[str, int]:
    """`peak_<graph>` bytes of each graph in node order, and `saved` bytes where both forward and backward are given."""
    names = [facts_of(graphs[0]).part] if len(graphs) == 1 else ["forward", "backward"]
    sizes = {f"peak_{name}": live_bytes(graph).peak_bytes
             for name, graph in zip(names, graphs, strict=True)}
    if len(graphs) == 2:
        sizes["saved"] = sum(row.held_bytes for row in saved_tensors(*graphs))
    return sizes


def step_peak(graphs: tuple[GraphModule, ...], *, fused: bool, replayed: bool = False, gpu: bool = False) -> StepPeak:
    """The peak of a step, whose graphs are forward and backward, or the whole step.

    fused: as for `live_bytes`. replayed: as CUDA graphs, whose recording keeps the saved tensors. Gradients are freed
    after the optimizer's update. gpu: a fake world's graphs stand for those of GPUs. Left out: what NCCL takes, and
    fragmentation.
    """
    inputs = graphs[0].graph.find_nodes(op="placeholder")
    extra = _WORKSPACES if gpu or any(map(_on_gpu, inputs)) else 0
    profiles = [live_bytes(gm, 10, fused=fused, keeps_saved=replayed) for gm in graphs]
    if len(graphs) == 1:
        whole = profiles[0]
        return StepPeak(whole.peak_bytes + extra, whole.input_bytes, "whole step", whole.holders)
    trained = _bytes(node for node in inputs if is_parameter(node))
    buffers = _bytes(node for node in inputs if parameter_of(node) and not is_parameter(node))
    resident = 3 * trained + buffers
    phases = [StepPeak(resident + trained + extra, resident, "optimizer", ())]
    for phase, gm, profile in zip(("forward", "backward"), graphs, profiles, strict=True):
        read = _bytes(node for node in gm.graph.find_nodes(op="placeholder") if parameter_of(node))
        size = resident + profile.peak_bytes - read + extra
        phases.append(StepPeak(size, resident, phase, profile.holders))
    return max(phases, key=lambda peak: peak.bytes)


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(tensor_bytes(node.meta.get("val")) for node in nodes)


def _on_gpu(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
