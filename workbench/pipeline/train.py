"""Train: the loop around a step, compiled or eager, and what it measured."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from workbench.authoring.authored import Authored
from workbench.authoring.materialise import seed_of
from workbench.authoring.microbatches import accumulate, cut
from workbench.errors import WorkbenchError
from workbench.graph.lower import Step
from workbench.pipeline.expert_load import ExpertLoad, balance, routed_layers
from workbench.pipeline.text_data import ByteText, load_text
from workbench.recipe.hooks import hook
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import few
from workbench.torch_api.determinism import deterministic, norm_of, seeded
from workbench.torch_api.distributed.adamw import ShardedAdamW, scalar_dtype
from workbench.torch_api.restoring import shard_of
from workbench.world.mesh import coordinates


def recipe_of(authored: Authored) -> Recipe:
    """The recipe `authored` was made from; WorkbenchError where there was none."""
    if authored.recipe is None:
        raise WorkbenchError(
            "this module was authored without a recipe, which says the data and the training: "
            "call the step in a loop of your own"
        )
    return authored.recipe


def text_of(recipe: Recipe) -> ByteText:
    """The text that the recipe trains on; WorkbenchError where it is missing, or too short for one sequence."""
    vocab_size = int(recipe.model.sizes()["vocab_size"])
    return load_text(recipe.data.path, seq_len=recipe.data.seq_len, vocab_size=vocab_size)


class Batches:
    """This rank's batches of the recipe's text: `at(step)` gives (tokens, targets), int64 (batch, seq_len)."""

    def __init__(self, authored: Authored):
        recipe = recipe_of(authored)
        place = coordinates(authored.mesh, authored.world.rank)
        self.spec, self.device = recipe.data, authored.world.device
        self.accumulate = recipe.training.accumulate
        self.dp_rank = place.get("dp_replicate", 0) * recipe.mesh.dp_shard + place.get(
            "dp_shard", 0
        )
        self.text = text_of(recipe)

    def at(self, step: int) -> tuple[torch.Tensor, ...]:
        batch = self.text.batch(
            step,
            seq_len=self.spec.seq_len,
            batch_per_rank=self.spec.batch_per_rank,
            dp_rank=self.dp_rank,
            seed=self.spec.seed,
        )
        if self.device.type == "cuda":  # a copy from other memory would wait for the device
            batch = batch[0].pin_memory(), batch[1].pin_memory()
        return tuple(tensor.to(self.device, non_blocking=True) for tensor in batch)

    def first(self) -> tuple[torch.Tensor, ...]:
        """What a step's graphs take at first: the first microbatch of the first step."""
        return cut(self.at(0), self.accumulate)[0]


@dataclass(frozen=True)
class Training:
    """What a run measured on this rank.

    losses: mean over the data-parallel ranks, one for each step. norms: total gradient norm before clipping.
    step_seconds: wall time of each step, the device synchronised; of steps whose loss was read together, their mean.
    peak_bytes: the CUDA allocator's peak, or None. load: what the experts got, of all ranks; None for a model without
    experts. first_step: how many steps the checkpoint had taken that the run resumed from. nan_norms: the steps whose
    norm was NaN or infinite, and nan_norm what the recipe does then.
    """

    losses: list[float]
    norms: list[float]
    step_seconds: list[float]
    tokens_per_step: int
    peak_bytes: int | None
    load: ExpertLoad | None = None
    first_step: int = 0
    nan_norms: list[int] = field(default_factory=list)
    nan_norm: str = "apply"

    def warning(self) -> str:
        """One sentence where a gradient norm was NaN or infinite, or else nothing."""
        if not self.nan_norms:
            return ""
        did = "skipped" if self.nan_norm == "skip" else "applied all the same"
        steps = few(list(map(str, self.nan_norms)), 5)
        return f"the gradient norm was NaN or infinite in step {steps}: the update was {did} (training.nan_norm)"


def optimizer_of(authored: Authored) -> torch.optim.Optimizer:
    """The optimizer of the recipe over the module's parameters: fused AdamW on shards; one group for each mesh.

    Its learning rate is a tensor, of the dtype in which the fused AdamW reads it.
    """
    device = authored.world.device
    lr = torch.tensor(
        recipe_of(authored).training.lr, dtype=scalar_dtype("lr", device), device=device
    )
    groups = [{"params": same} for same in by_mesh(authored.module.parameters())]
    return ShardedAdamW(groups, lr=lr, fused=True)


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that lie on one mesh together, without integers: an operator on a list of DTensors takes only such."""
    meshes: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad or parameter.is_floating_point():
            meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(meshes.values())


def squares(gradients: Sequence[torch.Tensor], copies: Sequence[int]) -> torch.Tensor:
    """This rank's part of the squared norm, in float64; `copies`: how many ranks hold the same shard of each."""
    groups: dict[int, list[torch.Tensor]] = {}
    for same, gradient in zip(copies, gradients, strict=True):
        groups.setdefault(same, []).append(gradient)
    total: Any = sum(norm_of(group).double() ** 2 / same for same, group in groups.items())
    return total  # type: ignore[no-any-return]


def copies_of(tensor: torch.Tensor, ranks: int) -> int:
    """How many of all ranks hold the same shard of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return ranks // math.prod(size for placement, size in sizes if not placement.is_replicate())


def clipping(norm: torch.Tensor, limit: float) -> torch.Tensor:
    """What scales gradients of this norm to one of at most `limit`, as `torch.nn.utils.clip_grads_with_norm_` does."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def total_norm(gradients: list[torch.Tensor], pipeline: int = 1) -> torch.Tensor:
    """The 2-norm over the whole gradients of all ranks, a plain scalar tensor: one reduction over the world.

    Each rank adds its shards' squares, divided by how many ranks hold the same shard. pipeline: as of a World.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    copies = [copies_of(g, ranks // pipeline) for g in gradients]
    total = squares([shard_of(g) for g in gradients], copies)
    if ranks > 1:
        dist.all_reduce(total)
    return total.sqrt().to(gradients[0].dtype)


def clip(authored: Authored, limit: float | None) -> torch.Tensor:
    """Scale the gradients to a norm of at most `limit`; returns the norm before, which is not read yet.

    Each rank scales its shards: DTensor's rules for lists are slow.
    """
    gradients = [p.grad for p in authored.module.parameters() if p.grad is not None]
    norm = total_norm(gradients, authored.world.pipeline)
    if limit is not None:
        torch.ops.aten._foreach_mul_.Tensor(
            [shard_of(gradient) for gradient in gradients], clipping(norm, limit)
        )
    return norm


def apart(
    authored: Authored, run: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A step of a forward, eager or compiled, whose optimizer runs outside of any graph: returns loss and norm."""
    spec = recipe_of(authored).training

    def step(*batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.accumulate > 1:
            loss = accumulate(run, authored.module, batch, spec.accumulate)
        else:
            loss = run(*batch)
            loss.backward()
        norm = clip(authored, spec.clip)
        if spec.nan_norm == "apply" or math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm

    return step


def check_saving(recipe: Recipe, folder: Path | str | None, save_every: int | None) -> None:
    """Raise WorkbenchError, before any rank starts, where a run cannot save to `folder` or resume from it."""
    if folder is not None or save_every is not None:
        hook("weights.check_saving", f"checkpoints {folder}")(recipe, folder, save_every)


def train(
    authored: Authored, step: Callable[..., Any] | None = None, *,
    progress: Callable[[int, float], Any] = lambda *_: None,
    folder: Path | str | None = None, save_every: int | None = None,
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
) -> Training:
    """Train up to step `recipe.training.steps`; every rank calls it.

    `step(tokens, targets)` is what `build` gave, or None for the module itself, eagerly. `progress(step,
    loss)` is called for each step, once its loss is read. folder: of checkpoints, which all ranks share: the run
    resumes from the newest one there, and writes one every `save_every` steps and at the end. scheduler: makes the
    learning rate's schedule of the optimizer; it steps once a training step, and a checkpoint holds its state.

    Random numbers, such as those of dropout, start from `training.seed` and the data-parallel rank; afterwards this
    process goes on with its own. Ranks of one tp group draw the same, because activations that they hold in copies must
    get one mask; parts of a tensor that tp cuts may get equal masks, too.
    """
    recipe, world = recipe_of(authored), authored.world
    spec = recipe.training
    check_saving(recipe, folder, save_every)
    if isinstance(step, Step) and step.optimizer is not None:
        run: Callable[..., Any] = step
        optimizer = step.optimizer
    else:
        optimizer = optimizer_of(authored)
        run = apart(authored, step or authored.module, optimizer)
    schedule = None if scheduler is None else scheduler(optimizer)
    saved = None
    if folder is not None:
        saved = hook("weights.checkpoints", f"checkpoints {folder}")(
            folder, authored, optimizer, schedule
        )
    batches = Batches(authored)
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    losses, norms, seconds = list[float](), list[float](), list[float]()
    load = ExpertLoad(list(routed_layers(authored.module)))
    seed = seed_of(spec.seed, f"training {batches.dp_rank}")
    with deterministic(spec.deterministic), seeded(seed), warnings.catch_warnings():
        # torch misses calls of the optimizer's own `step`, which some kinds of step do not need
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        first = 0 if saved is None else saved.resume()
        pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        counts: list[torch.Tensor] = []
        started = time.perf_counter()
        for index in range(first, spec.steps):
            pending.append(run(*batches.at(index)))
            counts.append(balance(authored.module))
            if schedule is not None:
                schedule.step()
            done = index + 1
            save = saved is not None and (
                done == spec.steps or done % (save_every or spec.steps) == 0
            )
            if done % spec.read_loss_every and done < spec.steps and not save:
                continue
            losses += _mean_losses([loss for loss, _ in pending], world.size)
            norms += torch.stack([norm for _, norm in pending]).tolist()
            load.note(counts)
            if cuda:
                torch.cuda.synchronize(world.device)
            seconds += [(time.perf_counter() - started) / len(pending)] * len(pending)
            for i in range(len(losses) - len(pending), len(losses)):
                progress(first + i, losses[i])
            if saved is not None and save:
                saved.save(done)
            pending, counts, started = [], [], time.perf_counter()
    tokens = recipe.data.seq_len * recipe.data.batch_per_rank * recipe.mesh.dp
    peak = torch.cuda.max_memory_allocated(world.device) if cuda else None
    not_finite = [first + i for i, norm in enumerate(norms) if not math.isfinite(norm)]
    return Training(
        losses,
        norms,
        seconds,
        tokens,
        peak,
        load if load.layers else None,
        first,
        not_finite,
        spec.nan_norm,
    )


def _mean_losses(pending: list[torch.Tensor], ranks: int) -> list[float]:
    """The mean of each loss over all ranks."""
    losses = torch.stack([loss.detach().reshape(()).to(torch.float64) for loss in pending])
    if ranks > 1:
        dist.all_reduce(losses)
    return (losses / ranks).tolist()
