"""Whether a model was put on its mesh rightly: replicas of a gradient agree, and the plain module gives the same.

A pass is compared with the graph before it, and the whole list with the authored module in eager PyTorch. Neither sees
a module that computes a wrong gradient because of its plan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from workbench.authoring.authored import Authored
from workbench.authoring.microbatches import step_counters
from workbench.checks.authoring import Authoring
from workbench.graph.read.nodes import module_path
from workbench.pipeline.expert_load import routed_layers
from workbench.pipeline.proofs.two_steps import differentiate
from workbench.recipe.wording import first_line
from workbench.torch_api import partitioning
from workbench.torch_api.ops import calls_of, is_random, may_be_random
from workbench.torch_api.restoring import restoring_module
from workbench.torch_api.tree import tree_map
from workbench.world.mesh import all_gather_object, coordinates

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Norm-relative, for sums in another order through all layers, by the dtype of the computation."""
OF_ALL = 0.01
"""A gradient that is zero in exact arithmetic may differ by this share of what all gradients together may."""


def check_replicas(authored: Authored, optimizer: torch.optim.Optimizer | None = None) -> Authoring:
    """Compare the replicas of each gradient that the parameters hold now. Every rank calls it; all get the same.

    The bits are compared, by two sums of them; where those differ on GPUs, whose kernels add in any order, the values.
    optimizer: that of a step which keeps its gradients to itself: its mean of them is compared.
    """
    gradients: dict[str, Any] = {}
    for name, p in authored.module.named_parameters():
        gradients[name] = p.grad if optimizer is None else optimizer.state.get(p, {}).get("exp_avg")
    groups = dict(_replicated(gradients))
    names = dict.fromkeys(name for name, _ in groups)
    sums = {name: _sums(_local(gradients[name])) for name in names}
    every = all_gather_object(sums)
    suspects = [
        key for key, ranks in groups.items() if any(every[rank][key[0]] != sums[key[0]] for rank in ranks)
    ]
    named = [key for keys in all_gather_object(suspects) for key in keys]
    sentences = [_of_replicas(gradients[name], name, axis) for name, axis in dict.fromkeys(named)]
    problems = _of_all_ranks([text for text in sentences if text])
    return Authoring(len(sums), problems, uncut=_uncut(authored))


def _uncut(authored: Authored) -> bool:
    """Whether there is a tensor-parallel axis, and no parameter is cut over it."""
    if authored.axes.get("tp", 1) == 1:
        return False
    for parameter in authored.module.parameters():
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                group = parameter.device_mesh.get_group(dim).group_name
                if group == authored.groups["tp"] and not placement.is_replicate():
                    return False
    return True


def _replicated(gradients: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], list[int]]]:
    """((parameter, axis), ranks of this rank's group) for each gradient and axis that keeps it whole."""
    for name, gradient in gradients.items():
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            axes: Sequence[Any] = mesh.mesh_dim_names or range(mesh.ndim)
            for axis, placement in zip(axes, gradient.placements, strict=True):
                if placement.is_replicate():
                    yield (name, axis), dist.get_process_group_ranks(mesh.get_group(axis))


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local()
    return local.detach().contiguous()


def _sums(local: torch.Tensor) -> tuple[int, int]:
    bits = local.view(-1).view(torch.uint8)
    return int(bits.sum(dtype=torch.int64)), int(bits[::3].sum(dtype=torch.int64))


def _of_replicas(gradient: Any, name: str, axis: str) -> str:
    """A sentence, where this rank's gradient is another than the first rank's of the axis."""
    group, local = gradient.device_mesh.get_group(axis), _local(gradient)
    first = local.clone()
    dist.broadcast(first, dist.get_process_group_ranks(group)[0], group=group)
    gap = float((local - first).double().norm() / first.double().norm().clamp_min(1e-30))
    if gap <= (0.0 if gradient.device_mesh.device_type == "cpu" else TOLERANCE[local.dtype]):
        return ""
    return (
        f"gradient of {name}: its replicas on axis {axis} differ: each rank computes a part of it, and nothing "
        "sums the parts: list its module in the plan, so that what it reads or returns is a DTensor"
    )


def _of_all_ranks(sentences: list[str]) -> tuple[str, ...]:
    every = [text for texts in all_gather_object(sentences) for text in texts]
    return tuple(dict.fromkeys(every))


def prove_authoring(
    authored: Authored, batch: tuple[Any, ...], graphs: Sequence[GraphModule]
) -> Authoring:
    """One eager step on this batch of each rank: replicas, and the plain module on all of the batches.

    graphs: those of the captured step, which say whether it draws random numbers.
    Every rank calls it, and each gets the same. Parameters, buffers, gradients and random numbers are unchanged
    afterwards.
    """
    with restoring_module(authored.module), torch.enable_grad():
        loss = authored.module(*batch)
        differentiate(loss)
        facts = check_replicas(authored)
        if facts.problems:
            return facts
        unknown = _why_not(authored, loss, graphs)
        problems: tuple[str, ...] = ()
        if not unknown:
            unknown, problems = _against_plain(authored, loss.detach(), batch)
    return replace(facts, problems=problems, unknown=unknown, compared=not unknown)


def _why_not(authored: Authored, loss: Any, graphs: Sequence[GraphModule]) -> str:
    """Why the plain module is not compared, on any rank; "" where it is."""
    reason = ""
    nodes = (node for graph in graphs for node in calls_of(graph.graph, may_be_random))
    counters = step_counters(authored.module)
    needed = sum(4 * p.numel() * p.element_size() for p in authored.module.parameters())
    if authored.plain is None:
        reason = "there is no plain copy of the module"
    elif not isinstance(loss, torch.Tensor) or loss.dim():
        reason = "its forward returns no scalar"
    elif written := [
        name for graph in graphs for name in partitioning.written_names(graph)
        if name not in counters
    ]:
        reason = f"buffer {written[0]} is written, and each rank's has seen its own batch alone"
    elif drawing := next(filter(is_random, nodes), None):
        path = module_path(drawing)
        where = f"module {path}" if path else "the model"
        reason = f"{where} draws random numbers"
    elif needed > (room := _free_bytes(authored)):
        reason = f"four times the model, {needed:,} bytes, is more than the {room:,} that are free"
    return next(filter(None, all_gather_object(reason)), "")


def _free_bytes(authored: Authored) -> int:
    """Free memory for this rank: of its GPU, or its share of the machine's."""
    if authored.world.device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", authored.world.size))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks


def _against_plain(
    authored: Authored, loss: torch.Tensor, batch: tuple[Any, ...]
) -> tuple[str, tuple[str, ...]]:
    """(why nothing could be compared, what differs)."""
    place = coordinates(authored.mesh, authored.world.rank)
    key = tuple(index for axis, index in place.items() if axis != "tp")
    host = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)
    batches = dict(all_gather_object((key, host)))
    parameters = dict(authored.module.named_parameters())
    values = {name: _whole(p.detach()) for name, p in parameters.items()}
    gradients = {name: _whole(p.grad) for name, p in parameters.items() if p.grad is not None}
    try:
        losses, plain = _plain_step(authored, values, batches)
    except Exception as error:
        unknown, sentences = f"the plain module raised {type(error).__name__}: {first_line(error)}", []
    else:
        unknown, sentences = "", _differences(authored, gradients, plain)
        if abs(float(loss) - losses[key]) > _tolerance(authored) * abs(losses[key]):
            sentences.insert(0, f"the loss is {float(loss):.6g}, and the plain module's {losses[key]:.6g}")
    unknown = next(filter(None, all_gather_object(unknown)), "")
    problems = _of_all_ranks(sentences)
    if problems and routed_layers(authored.module):
        return f"its experts may be chosen, or drop tokens, otherwise than on one rank: {problems[0]}", ()
    return unknown, problems


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain_step(
    authored: Authored, values: Mapping[str, torch.Tensor], batches: Mapping[Any, tuple[Any, ...]]
) -> tuple[dict[Any, float], dict[str, torch.Tensor]]:
    """The plain module's loss on each batch, and the mean of their gradients by parameter."""
    assert authored.plain is not None
    state: dict[str, torch.Tensor] = {n: b.clone() for n, b in authored.module.named_buffers()}
    leaves = {}
    for name, meta in authored.plain.named_parameters():
        leaves[name] = values[name].to(meta.dtype).requires_grad_(meta.requires_grad)
    losses = {}
    for key, batch in batches.items():
        inputs = tree_map(
            lambda leaf: leaf.to(authored.world.device) if isinstance(leaf, torch.Tensor) else leaf, batch
        )
        loss = torch.func.functional_call(authored.plain, leaves | state, inputs)
        (loss / len(batches)).backward()
        losses[key] = loss.item()
    return losses, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _tolerance(authored: Authored) -> float:
    assert authored.plain is not None
    parameters = filter(torch.is_floating_point, authored.plain.parameters())
    return max(TOLERANCE[p.dtype] for p in parameters)


def _differences(
    authored: Authored, gradients: Mapping[str, torch.Tensor], plain: Mapping[str, torch.Tensor]
) -> list[str]:
    """A sentence for each gradient of the sharded model that the plain module does not give."""
    limit = _tolerance(authored)
    total = torch.stack([gradient.double().norm() for gradient in plain.values()]).norm()
    sentences = []
    for name in dict.fromkeys((*gradients, *plain)):
        if name not in gradients or name not in plain:
            where = "plain" if name in plain else "sharded"
            sentences.append(f"only the {where} module has a gradient of {name}")
            continue
        expected = plain[name].double()
        gap = float((gradients[name].double() - expected).norm())
        if not gap <= limit * float(torch.maximum(expected.norm(), OF_ALL * total)):
            sentences.append(
                f"the gradient of {name} differs from the plain module's, by {gap / float(expected.norm()):.0e} of "
                "its norm: look at how the plan cuts its module, and at what reads the result"
            )
    return sentences
