"""The ranks that a recipe runs on: one of a fake world, the ranks of this process's world, a pool's, or new ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeGuard, TypeVar

import torch.distributed as dist

from workbench.errors import WorkbenchError
from workbench.pipeline.build import check_buildable
from workbench.pipeline.progress import Post, Progress, Teller, telling
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.recipe.wording import counted
from workbench.torch_api.cuda_graphs import close_recorders
from workbench.torch_api.distributed.gloo import one_worker_thread
from workbench.torch_api.distributed.nccl import own_gpu
from workbench.torch_api.supported import require_torch
from workbench.world.fake import fake_world
from workbench.world.mesh import World, WorldError, all_gather_object, current_world
from workbench.world.ranks import RankPool, ranks, resolve
from workbench.world.worker import send_progress

Answer = TypeVar("Answer")
WorldChoice = Literal["auto", "fake", "gloo", "nccl"]


def runnable(recipe: Recipe | str | os.PathLike[str], world: WorldChoice | RankPool) -> Recipe:
    """The recipe, read where it is a name or a path; WorkbenchError for an unknown world or an unsupported torch."""
    require_torch()
    if not isinstance(world, RankPool) and world not in ("auto", "fake", "gloo", "nccl"):
        raise WorkbenchError(f"world {world!r} is none of auto, fake, gloo, nccl")
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def on_ranks(
    recipe: Recipe, world: WorldChoice | RankPool, function: Callable[..., Answer], *args: Any,
    timeout: float, progress: Progress,
) -> list[Answer]:
    """Call `function(recipe, *args, post)` on every rank of the recipe's mesh; the ranks' answers.

    A fake world has the answer of one rank. In a process that is a rank already, every rank gets all answers. post:
    tells the stages of rank 0 to `progress`. timeout: seconds for all of it. Raises WorkbenchError for what this world
    cannot do, RankError where a rank fails.
    """
    steps = recipe.training.steps
    check_buildable(recipe, world.backend if isinstance(world, RankPool) else world)
    if world == "fake":
        with fake_world(recipe.world_size), telling(progress) as tell:
            return [function(recipe, *args, Post(tell.hear, steps))]
    if among_ranks(world):
        with (
            joined(recipe, world, timeout=timeout) as joined_world,
            telling(joined_world.rank == 0 and progress) as tell,
        ):
            return all_gather_object(function(recipe, *args, Post(tell.hear, steps)))
    pools: AbstractContextManager[RankPool]
    with telling(progress) as tell:
        tell(f"start {counted(recipe.world_size, 'rank')}")
        if isinstance(world, RankPool):
            _require_size(recipe, world.size, "this pool has")
            pools = nullcontext(world)
        else:
            pools = ranks(recipe.world_size, backend=world, timeout=timeout)
        with pools as pool:
            call = function, recipe, args, type(tell) is not Teller
            return pool.run_on(range(pool.size), _with_post, call, progress=tell.hear)


def _with_post(
    function: Callable[..., Answer], recipe: Recipe, args: Sequence[Any], report: bool
) -> Answer:
    send = send_progress if report and current_world().rank == 0 else None
    return function(recipe, *args, Post(send, recipe.training.steps))


def _require_size(recipe: Recipe, size: int, who: str) -> None:
    count = recipe.world_size
    if count != size:
        raise WorldError(
            f"recipe {recipe.name!r} needs {counted(count, 'rank')}, and {who} {size}: change the mesh, "
            f"or start {counted(count, 'rank')}"
        )


def launched() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def among_ranks(world: WorldChoice | RankPool) -> TypeGuard[WorldChoice]:
    """Whether this process is a rank, whose world is to be used: no pool was given."""
    return not isinstance(world, RankPool) and (dist.is_initialized() or launched())


@contextmanager
def joined(
    recipe: Recipe, kind: WorldChoice = "auto", *, timeout: float = 600.0
) -> Iterator[World]:
    """The world that this process is a rank of already, or that torchrun started it for: left again at the end.

    kind and timeout are those of `run`. WorldError where the recipe's mesh has another size.
    """
    if dist.is_initialized():
        world = current_world()
        _require_size(recipe, world.size, f"this {world.kind} world has")
        yield world
        return
    size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    _require_size(recipe, size, "torchrun started")
    backend = resolve(kind, local_size)
    device = own_gpu(backend, local)
    with one_worker_thread():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=device)
        try:
            yield current_world()
        finally:
            close_recorders()
            dist.destroy_process_group()
