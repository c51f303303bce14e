"""The step's peak memory, estimated before it runs: what lives across steps, and what each phase adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from workbench.graph.read.fused_cost import fusion_groups, traffic_of
from workbench.graph.read.memory import MemoryProfile, live_bytes
from workbench.torch_api.aot import is_parameter, parameter_of
from workbench.torch_api.ops import short_name, tensor_bytes

_WORKSPACES = 2 * 32 * 2**20
"""What cuBLAS takes on a Hopper GPU, once in the forward's thread and once in the backward's. Source:
aten/src/ATen/cuda/CublasHandlePool.cpp."""
_BUFFERED = ("scatter", "index_put")
"""Inductor writes the results of these to memory, also in the middle of a fused kernel."""


@dataclass(frozen=True)
class StepPeak:
    """Bytes on one rank. resident: what lives across steps: parameters, two states of AdamW for each, and buffers.
    phase: the one with the peak. holders: (tensor, bytes, parameter or module) of the largest values alive then.
    """

    bytes: int
    resident: int
    phase: str
    holders: tuple[tuple[str, int, str], ...]

    def __str__(self) -> str:
        lines = [f"predicted peak {self.bytes:,} bytes, in the {self.phase}; {self.resident:,} of it live across steps"]
        return "\n".join(lines + [f"  {size:>14,}  {name}  {module}" for name, size, module in self.holders])


def step_peak(graphs: tuple[GraphModule, ...], *, fused: bool, replayed: bool = False, holders: int = 10,
              gpu: bool = False) -> StepPeak:
    """The peak of a step, whose graphs are forward and backward, or the whole step.

    fused: whether a compiler follows. replayed: as CUDA graphs, whose recording keeps the saved tensors. Gradients are
    freed after the optimizer's update. gpu: a fake world's graphs stand for those of GPUs. Left out: what NCCL takes,
    and fragmentation.
    """
    extra = _WORKSPACES if gpu or _on_gpu(graphs[0]) else 0
    profiles = [_live(gm, holders, fused, replayed) for gm in graphs]
    if len(graphs) == 1:
        whole = profiles[0]
        return StepPeak(whole.peak_bytes + extra, whole.input_bytes, "whole step", whole.holders)
    forward = graphs[0].graph.find_nodes(op="placeholder")
    trained = _bytes(n for n in forward if is_parameter(n))
    resident = 3 * trained + _bytes(n for n in forward if parameter_of(n) and not is_parameter(n))
    found = [StepPeak(resident + trained + extra, resident, "optimizer", ())]
    for phase, gm, profile in zip(("forward", "backward"), graphs, profiles, strict=True):
        given = _bytes(n for n in gm.graph.find_nodes(op="placeholder") if parameter_of(n))
        found.append(StepPeak(resident + profile.peak_bytes - given + extra, resident, phase, profile.holders))
    return max(found, key=lambda each: each.bytes)


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(tensor_bytes(n.meta.get("val")) for n in nodes)


def _on_gpu(gm: GraphModule) -> bool:
    values = (n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
    return any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in values)


def _live(gm: GraphModule, holders: int, fused: bool, replayed: bool) -> MemoryProfile:
    """Of a fused kernel, only what others read takes memory, from when the kernel runs or its first reader does."""
    runs_at: dict[Node, Node] = {}
    unwritten = set[Node]()
    place = {n: i for i, n in enumerate(gm.graph.nodes)}
    for group in fusion_groups(gm) if fused else []:
        inside, written = set(group), traffic_of(group).writes
        for node in group:
            if node.name not in written and not short_name(node).startswith(_BUFFERED):
                unwritten.add(node)
            runs_at[node] = min([group[-1], *(n for n in node.users if n not in inside)], key=place.__getitem__)
    return live_bytes(gm, holders, runs_at=runs_at, unwritten=unwritten, keeps_saved=replayed)
