"""Train: the loop around a step, compiled or eager, and what it measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workbench.authoring.author import Authored
from workbench.errors import WorkbenchError
from workbench.pipeline.expert_load import ExpertLoad, balance, routed_layers
from workbench.pipeline.text_data import load_text
from workbench.recipe.recipe import Recipe
from workbench.torch_api.determinism import deterministic
from workbench.world.mesh import coordinates


def recipe_of(authored: Authored) -> Recipe:
    """The recipe `authored` was made from; WorkbenchError where there was none."""
    if authored.recipe is None:
        raise WorkbenchError("this module was authored without a recipe, which says the data and the training: "
                             "call the step in a loop of your own")
    return authored.recipe


__all__ = ["Batches", "Training", "deterministic", "optimizer_of", "total_norm", "train"]


class Batches:
    """This rank's batches of the recipe's text: `at(step)` gives (tokens, targets), int64 (batch, seq_len)."""

    def __init__(self, authored: Authored):
        recipe = recipe_of(authored)
        place = coordinates(authored.mesh, authored.world.rank)
        self.spec, self.device = recipe.data, authored.world.device
        self.dp_rank = place.get("dp_replicate", 0) * recipe.mesh.dp_shard + place.get("dp_shard", 0)
        self.text = load_text(
            self.spec.path, seq_len=self.spec.seq_len, vocab_size=int(recipe.model.sizes()["vocab_size"])
        )

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        batch = self.text.batch(
            step, seq_len=spec.seq_len, batch_per_rank=spec.batch_per_rank, dp_rank=self.dp_rank, seed=spec.seed
        )
        return batch[0].to(self.device), batch[1].to(self.device)


Step = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Training:
    """What a run measured on this rank.

    losses: mean over the data-parallel ranks, one for each step. norms: total gradient norm before clipping.
    step_seconds: wall time of each step, the device synchronised. peak_bytes: the CUDA allocator's peak, or None.
    load: what the experts got, of all ranks; None for a model without experts.
    """

    losses: list[float]
    norms: list[float]
    step_seconds: list[float]
    tokens_per_step: int
    peak_bytes: int | None
    load: ExpertLoad | None = None


def optimizer_of(authored: Authored) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the module's parameters: AdamW, fused on a GPU; one group for each mesh."""
    spec = recipe_of(authored).training
    fused = authored.world.device.type == "cuda"
    foreach = None if fused else False
    groups = [{"params": same} for same in _by_mesh(authored.module.parameters())]
    return torch.optim.AdamW(groups, lr=spec.lr, fused=fused, foreach=foreach)


def _by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that lie on one mesh together: an operator on a list of DTensors takes only such."""
    found: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(found.values())


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The 2-norm over the whole gradients of all ranks, a plain scalar tensor: one reduction over the world.

    Each rank adds its shards' squares, divided by how many ranks hold the same shard.
    """
    copies: dict[int, list[torch.Tensor]] = {}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for gradient in gradients:
        local, same = gradient, ranks
        if isinstance(gradient, DTensor):
            sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
            local, same = gradient.to_local(), ranks // shards
        copies.setdefault(same, []).append(local)
    total = sum(torch.nn.utils.get_total_norm(found).double() ** 2 / same for same, found in copies.items())
    assert isinstance(total, torch.Tensor)
    if ranks > 1:
        dist.all_reduce(total)
    return total.sqrt().to(gradients[0].dtype)


def _clip(authored: Authored, optimizer: torch.optim.Optimizer, limit: float | None) -> float:
    parameters = [p for p in authored.module.parameters() if p.grad is not None]
    norm = total_norm([p.grad for p in parameters])  # type: ignore[misc]
    if limit is not None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grads_with_norm_(group["params"], limit, norm)
    return float(norm)


def _average(loss: torch.Tensor, size: int) -> float:
    value = loss.detach().to(torch.float64).clone()
    if size > 1:
        dist.all_reduce(value)
        value /= size
    return float(value)


def train(
    authored: Authored, step: Step | None = None, *, progress: Callable[[int, float], Any] = lambda *_: None
) -> Training:
    """Train for `recipe.training.steps` steps; every rank calls it.

    `step(tokens, targets)` is a CompiledStep, or None for the module itself, eagerly. `progress(step, loss)` is called
    after each step.
    """
    recipe, world = recipe_of(authored), authored.world
    run: Step = authored.module if step is None else step
    batches = Batches(authored)
    optimizer = optimizer_of(authored)
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    losses, norms, seconds = [], [], []
    load = ExpertLoad(list(routed_layers(authored.module)))
    with deterministic(recipe.training.deterministic):
        for index in range(recipe.training.steps):
            started = time.perf_counter()
            loss = run(*batches.at(index))
            loss.backward()
            norms.append(_clip(authored, optimizer, recipe.training.clip))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            balance(authored.module, load)
            losses.append(_average(loss, world.size))
            if cuda:
                torch.cuda.synchronize(world.device)
            seconds.append(time.perf_counter() - started)
            progress(index, losses[-1])
    tokens = recipe.data.seq_len * recipe.data.batch_per_rank * recipe.mesh.dp
    peak = torch.cuda.max_memory_allocated(world.device) if cuda else None
    return Training(losses, norms, seconds, tokens, peak, load if load.layers else None)
