"""The part of a step behind the backward: the gradients' norm, clipping and AdamW, as functions of local shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.authoring.authored import Authored
from workbench.torch_api.determinism import norm_of
from workbench.torch_api.distributed.adamw import FUSED
from workbench.torch_api.inductor import lowering

STATE = ("exp_avg", "exp_avg_sq")
SCALARS = ("step", "lr")


@dataclass(frozen=True)
class Update:
    """AdamW's numbers. clip: the largest norm, or None. skip: a step whose norm is not finite changes nothing."""

    clip: float | None = 1.0
    skip: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2


def scalar_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the step count or the learning rate: the fused AdamW of a CPU reads the latter in float64."""
    return torch.float64 if name == "lr" and device.type == "cpu" else torch.float32


def squares(gradients: Sequence[torch.Tensor], copies: Sequence[int]) -> torch.Tensor:
    """This rank's part of the squared norm, in float64; `copies`: how many ranks hold the same shard of each."""
    groups: dict[int, list[torch.Tensor]] = {}
    for same, gradient in zip(copies, gradients, strict=True):
        groups.setdefault(same, []).append(gradient)
    total = sum(norm_of(found).double() ** 2 / same for same, found in groups.items())
    assert isinstance(total, torch.Tensor)
    return total


def copies_of(tensor: torch.Tensor, ranks: int) -> int:
    """How many of all ranks hold the same shard of a tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return ranks
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())


def shards_of(authored: Authored, names: Sequence[str]) -> list[int]:
    """`copies_of` each named parameter."""
    held = dict(authored.module.named_parameters())
    return [copies_of(held[name], authored.world.size) for name in names]


def append_update(graph: Graph, update: Update, parameters: Sequence[Node], gradients: Sequence[Node],
                  copies: Sequence[int], decompositions: Mapping[Any, Any] | None) -> Node:
    """Append the state's placeholders, the norm, clipping and AdamW; returns the norm's node."""
    given = [[*parameters], [*gradients], *_placeholders(graph, parameters)]
    table = dict(decompositions) if decompositions is not None else None
    traced = make_fx(_step(update, copies), table)(*([n.meta["val"] for n in nodes] for nodes in given))
    traced.graph.eliminate_dead_code()
    inside: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"),
                                       [n for nodes in given for n in nodes], strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            inside[node] = graph.node_copy(node, inside.__getitem__)
    (norm,) = traced.graph.output_node().all_input_nodes
    found: Node = inside[norm]
    return found


def _placeholders(graph: Graph, parameters: Sequence[Node]) -> list[list[Node]]:
    """Placeholders behind the forward's: [exp_avg of each, exp_avg_sq of each, [step, lr]]."""
    last = graph.find_nodes(op="placeholder")[-1]
    shards = [p.meta["val"] for p in parameters]
    device = shards[0].device
    with lowering.detect_fake_mode(shards):
        kinds = [[(f"{kind}_{i}", torch.empty_like(shard)) for i, shard in enumerate(shards)] for kind in STATE]
        kinds.append([(name, torch.empty((), dtype=scalar_dtype(name, device), device=device)) for name in SCALARS])
    made: list[list[Node]] = []
    for kind in kinds:
        made.append([])
        for name, value in kind:
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            last.meta["val"] = value
            made[-1].append(last)
    return made


def clipping(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What scales gradients of this norm to one of at most `limit`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides, as autograd accumulates it: the fused AdamW walks through memory."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _step(update: Update, copies: Sequence[int]) -> Any:
    """What `pipeline.train` does to gradients and parameters, as one function of lists of tensors."""

    def run(parameters: Any, gradients: Any, exp_avg: Any, exp_avg_sq: Any, scalars: Any) -> torch.Tensor:
        step, lr = scalars
        gradients = [laid_out_as(p, g) for p, g in zip(parameters, gradients, strict=True)]
        total = squares(gradients, copies)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            everyone = torch.distributed.group.WORLD
            assert everyone is not None
            total = torch.ops._c10d_functional.all_reduce(total, "sum", everyone.group_name)
            total = torch.ops._c10d_functional.wait_tensor(total)
        norm = total.sqrt().to(gradients[0].dtype)
        if update.clip is not None:
            scale = clipping(norm, update.clip)
            gradients = [gradient * scale for gradient in gradients]
        found = None
        if update.skip:
            found = torch.logical_not(torch.isfinite(norm)).to(torch.float32)
            step.add_(1 - found)
        else:
            step.add_(1)
        FUSED(
            parameters, gradients, exp_avg, exp_avg_sq, [], [step] * len(parameters), lr=lr, beta1=update.betas[0],
            beta2=update.betas[1], weight_decay=update.weight_decay, eps=update.eps, amsgrad=False, maximize=False,
            found_inf=found)
        return norm

    return run
