"""Checkpoints of a training run by torch.distributed.checkpoint: whole or not at all, and read onto any mesh.

    folder/step_00000004/   parameters, buffers, optimizer, learning rates, scheduler; random numbers of each rank, and
                            its buffers where ranks differ; and about.json, written last
    folder/.saving/         a checkpoint that is being written; renamed when it is complete
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from workbench.authoring.authored import Authored
from workbench.errors import WorkbenchError, full_disk
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import mesh_text
from workbench.torch_api.determinism import random_state, set_random_state
from workbench.torch_api.distributed.adamw import STATE, scalar_dtype
from workbench.world.mesh import all_gather_object

ABOUT, SAVING, FORMAT = "about.json", ".saving", 4


class Checkpoints:
    """The checkpoints of one run in `folder`, which all ranks share. Every rank calls each method.

    scheduler: of the learning rate.
    """

    def __init__(self, folder: Path | str, authored: Authored, optimizer: torch.optim.Optimizer,
                 scheduler: LRScheduler | None = None):
        assert authored.recipe is not None
        self.folder, self.recipe = Path(folder).absolute(), authored.recipe
        self.module, self.world = authored.module, authored.world
        self.optimizer, self.scheduler = optimizer, scheduler

    def resume(self) -> int:
        """Read the newest checkpoint, and return the number of steps it has taken: 0 where there is none.

        Raises WorkbenchError for a checkpoint of another model, or one that lost bytes, or one of another mesh whose
        ranks had buffers of their own.
        """
        place = newest(self.folder)
        if place is None:
            return 0
        about = checked(place, self.recipe)
        state = self._tensors() | {"schedule": {}}
        random, rank_buffers = f"random.{self.world.rank}", f"buffers.{self.world.rank}"
        if about["buffers_by_rank"]:
            state[rank_buffers] = {}
        if self.world.rank < about["ranks"]:  # on more ranks there may be no random numbers to go on with
            state[random] = {}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            dcp.load(state, checkpoint_id=place, planner=planner, no_dist=not dist.is_initialized())
        except (Exception, dcp.CheckpointException) as error:  # what a damaged file raises is of many types
            raise damaged(place, f"torch.distributed.checkpoint cannot read it ({_why(error)})") from error
        self._set_schedule(place, state["schedule"])
        if random in state:
            set_random_state(state[random])
        buffers = dict(self.module.named_buffers())
        for name, value in state.get(rank_buffers, {}).items():
            buffers[name].copy_(value)
        return int(about["steps"])

    def save(self, steps: int) -> Path:
        """Write a checkpoint after `steps` steps; earlier ones stay."""
        first, saving, place = self.world.rank == 0, self.folder / SAVING, self.folder / f"step_{steps:08d}"
        state = self._tensors() | {"schedule": self._schedule(), f"random.{self.world.rank}": random_state()}
        rank_buffers = self._buffers_by_rank()
        if rank_buffers:
            state[f"buffers.{self.world.rank}"] = rank_buffers
        planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            if first:
                shutil.rmtree(saving, ignore_errors=True)
            self._barrier()
            dcp.save(state, checkpoint_id=saving, planner=planner, no_dist=not dist.is_initialized())
            if first:
                sizes = {file.name: file.stat().st_size for file in sorted(saving.iterdir())}
                about = {"format": FORMAT, "steps": steps, **_settings(self.recipe), "ranks": self.world.size,
                         "mesh": mesh_text(self.recipe.mesh.axes), "buffers_by_rank": list(rank_buffers),
                         "bytes": sizes}
                write_whole(saving / ABOUT, json.dumps(about, indent=2) + "\n")
                shutil.rmtree(place, ignore_errors=True)
                saving.rename(place)
            self._barrier()
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            shutil.rmtree(saving, ignore_errors=True)  # of a full disk it holds what is left
            raise WorkbenchError(
                f"checkpoint {place}: it cannot be written: {_why(error)}: free space there, or "
                "take another folder"
            ) from error
        return place

    def _tensors(self) -> dict[str, Any]:
        """What is saved, by name; `dcp.load` writes into these tensors in place."""
        persistent = self.module.state_dict().keys()
        parameters, buffers = dict(self.module.named_parameters()), dict(self.module.named_buffers())
        tensors: dict[str, Any] = {f"model.{name}": p.detach() for name, p in parameters.items()}
        tensors |= {f"model.{name}": buffer for name, buffer in buffers.items() if name in persistent}
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            state = self.optimizer.state[parameter]
            if not state:
                device = self.world.device
                state["step"] = torch.zeros((), dtype=scalar_dtype("step", device), device=device)
                state |= {key: torch.zeros_like(parameter.detach()) for key in STATE}
            tensors |= {f"optimizer.{name}.{key}": state[key] for key in ("step", *STATE)}
        return tensors

    def _buffers_by_rank(self) -> dict[str, torch.Tensor]:
        """This rank's values of the persistent buffers that some rank holds with other values than rank 0."""
        if not dist.is_initialized():
            return {}
        persistent, values, differing = self.module.state_dict().keys(), {}, set[str]()
        for name, buffer in self.module.named_buffers():
            if name not in persistent or isinstance(buffer, DTensor):
                continue
            values[name] = buffer.detach().cpu()
            ours = buffer.detach().contiguous().flatten().view(torch.uint8)
            first = ours.clone()
            dist.broadcast(first, 0)
            if not torch.equal(first, ours):
                differing.add(name)
        names = set[str]().union(*all_gather_object(differing))
        return {name: value for name, value in values.items() if name in names}

    def _schedule(self) -> dict[str, Any]:
        """The learning rate of each group of parameters, with the scheduler's class and state."""
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        state = None if self.scheduler is None else self.scheduler.state_dict()
        return {"rates": rates, "class": self._class(), "state": state}

    def _class(self) -> str:
        return "no scheduler" if self.scheduler is None else f"scheduler {type(self.scheduler).__name__}"

    def _set_schedule(self, place: Path, saved: dict[str, Any]) -> None:
        """Go on with the checkpoint's learning rates, each written into its tensor where it is one."""
        groups, rates = self.optimizer.param_groups, saved["rates"]
        if saved["class"] != self._class():
            raise WorkbenchError(
                f"checkpoint {place}: its run had {saved['class']}, and this one has "
                f"{self._class()}: give train the same scheduler, or take another folder"
            )
        if len(rates) != len(groups) and (self.scheduler is not None or len(set(rates)) > 1):
            raise WorkbenchError(
                f"checkpoint {place}: it has learning rates of {len(rates)} groups of parameters, "
                f"and on this mesh there are {len(groups)}: resume on the mesh that saved it"
            )
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["state"])
        by_group = rates if len(rates) == len(groups) else rates[:1] * len(groups)
        for group, rate in zip(groups, by_group, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint in `folder`, if there is one."""
    return max(folder.glob("step_*"), default=None)


def check_saving(recipe: Recipe, folder: Path | str | None, save_every: int | None) -> None:
    """Raise WorkbenchError, before any rank starts, where a run cannot save to `folder` or resume from it."""
    if save_every is not None and save_every < 1:
        raise WorkbenchError(f"save_every {save_every!r}: give a number of steps, 1 or more")
    if folder is None:
        raise WorkbenchError(f"save_every {save_every} without a folder: say where the checkpoints go")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise WorkbenchError(f"checkpoints {folder}: the folder cannot be made: {why}") from error
    place = newest(folder)
    steps = 0 if place is None else checked(place, recipe)["steps"]
    if steps >= recipe.training.steps:
        raise WorkbenchError(f"checkpoint {place}: it has taken {steps} steps, and training.steps is "
                             f"{recipe.training.steps}: set more steps, or take another folder")


def checked(place: Path, recipe: Recipe) -> dict[str, Any]:
    """What a checkpoint says of itself, once its files have their sizes and it is of this recipe's model and rate."""
    try:
        about: dict[str, Any] = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise damaged(place, f"{ABOUT} cannot be read") from None
    if about.get("format") != FORMAT:
        raise WorkbenchError(
            f"checkpoint {place}: it has format {about.get('format')}, and this workbench reads "
            f"{FORMAT}: read it with the workbench that wrote it"
        )
    for name, size in about["bytes"].items():
        now = (place / name).stat().st_size if (place / name).exists() else 0
        if now != size:
            raise damaged(place, f"{name} has {now:,} bytes, and {size:,} were written")
    for section, values in _settings(recipe).items():
        for key in values.keys() | about[section].keys():
            there, here = about[section].get(key), values.get(key)
            if there != here:
                raise WorkbenchError(
                    f"checkpoint {place}: {section}.{key} is {there!r} there and {here!r} in "
                    f"recipe {recipe.name!r}: a run resumes with the same model and learning "
                    "rate: take its recipe, or another folder"
                )
    mesh = mesh_text(recipe.mesh.axes)
    if about["buffers_by_rank"] and about["mesh"] != mesh:
        raise WorkbenchError(
            f"checkpoint {place}: buffer {about['buffers_by_rank'][0]} has other values on each "
            f"rank of mesh {about['mesh']}, and recipe {recipe.name!r} has mesh {mesh}: resume "
            "on the mesh that saved it, or take another folder"
        )
    return about


def damaged(place: Path, fault: str) -> WorkbenchError:
    """The error for a checkpoint that cannot be read."""
    return WorkbenchError(
        f"checkpoint {place}: {fault}: delete this folder, and training resumes from the "
        "checkpoint before"
    )


def _settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What a run must have in common with the one that it resumes."""
    return {"model": {"family": recipe.model.family, **recipe.model.sizes()}, "training": {"lr": recipe.training.lr}}


def _why(error: BaseException) -> str:
    """One line; of what torch.distributed.checkpoint gathered, the error of the first rank that failed."""
    failures = getattr(error, "failures", {})
    first = next((cause for cause, _ in failures.values()), error)
    first = first.__context__ if isinstance(first.__context__, OSError) else first  # torch's writer hides it
    lines = str(first).strip().splitlines() or [type(first).__name__]
    return getattr(first, "strerror", None) or full_disk(str(first)) or lines[-1]
