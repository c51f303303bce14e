"""Checkpoints of a training run: written whole or not at all, and read onto any mesh.

    folder/step_00000004/   parameters, buffers and optimizer by torch.distributed.checkpoint, rates.pt with learning
                            rates and scheduler, a file of random state for each rank, and about.json, written last
    folder/.saving/         a checkpoint that is being written; renamed when it is complete
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import LRScheduler

from workbench.authoring.authored import Authored
from workbench.errors import WorkbenchError, full_disk
from workbench.recipe.recipe import Recipe
from workbench.torch_api.determinism import random_state, set_random_state
from workbench.torch_api.distributed.adamw import STATE, scalar_dtype

ABOUT, RATES, SAVING, FORMAT = "about.json", "rates.pt", ".saving", 2


class Checkpoints:
    """The checkpoints of one run in `folder`, which all ranks share. Every rank calls each method.

    scheduler: of the learning rate.
    """

    def __init__(self, folder: Path | str, authored: Authored, optimizer: torch.optim.Optimizer,
                 scheduler: LRScheduler | None = None):
        self.folder, self.authored, self.optimizer = Path(folder).absolute(), authored, optimizer
        self.scheduler = scheduler
        assert authored.recipe is not None
        self.recipe: Recipe = authored.recipe

    def resume(self) -> int:
        """Read the newest checkpoint, and return the number of steps it has taken: 0 where there is none.

        Raises WorkbenchError for a checkpoint of another model, or one that lost bytes.
        """
        steps, place = taken(self.folder, self.recipe), newest(self.folder)
        if place is None:
            return 0
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=str(place), no_dist=not dist.is_initialized())
        except (Exception, dcp.CheckpointException) as error:  # what a damaged file raises is of many types
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise damaged(place, f"torch.distributed.checkpoint cannot read it ({said[-1]})") from error
        self._set_rates(place)
        mine = place / f"random_{self.authored.world.rank}.pt"
        if mine.exists():  # on another number of ranks there may be no random numbers to go on with
            set_random_state(_read(mine))
        return steps

    def save(self, steps: int) -> Path:
        """Write a checkpoint after `steps` steps; earlier ones stay."""
        rank, saving, place = self.authored.world.rank, self.folder / SAVING, self.folder / f"step_{steps:08d}"
        try:
            if rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
                saving.mkdir(parents=True)
            self._barrier()
            dcp.save(self._state(), checkpoint_id=str(saving), no_dist=not dist.is_initialized())
            _write(saving / f"random_{rank}.pt", random_state())
            self._barrier()
            if rank == 0:
                _write(saving / RATES, self._rates())
                self._finish(saving, place, steps)
            self._barrier()
        except (OSError, RuntimeError, dcp.CheckpointException) as error:
            shutil.rmtree(saving, ignore_errors=True)  # of a full disk it holds what is left
            raise WorkbenchError(f"checkpoint {place}: it cannot be written: {_why(error)}: free space there, or take "
                                 "another folder") from error
        return place

    def _finish(self, saving: Path, place: Path, steps: int) -> None:
        """Make the files durable, say what they are, and give the checkpoint its name in one step."""
        sizes = {}
        for file in sorted(saving.iterdir()):
            sizes[file.name] = file.stat().st_size
            _sync(file)
        about = {"format": FORMAT, "steps": steps, **_settings(self.recipe), "ranks": self.authored.world.size,
                 "bytes": sizes}
        (saving / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _sync(saving / ABOUT)
        shutil.rmtree(place, ignore_errors=True)
        saving.rename(place)
        _sync(self.folder)

    def _state(self) -> dict[str, Any]:
        """What is saved, by name; `dcp.load` writes into these tensors in place."""
        module = self.authored.module
        kept = module.state_dict().keys()
        found: dict[str, Any] = {f"model.{name}": p.detach() for name, p in module.named_parameters()}
        found |= {f"model.{name}": b for name, b in module.named_buffers() if name in kept}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            state = self.optimizer.state[parameter]
            if not state:
                device = self.authored.world.device
                state["step"] = torch.zeros((), dtype=scalar_dtype("step", device), device=device)
                state |= {key: torch.zeros_like(parameter.detach()) for key in STATE}
            found |= {f"optimizer.{name}.{key}": state[key] for key in ("step", *STATE)}
        return found

    def _rates(self) -> dict[str, Any]:
        """Each parameter's learning rate, with what a scheduler started from, and the scheduler's own state."""
        names = {id(p): name for name, p in self.authored.module.named_parameters()}
        rates = {names[id(p)]: {key: float(group[key]) for key in _RATES if key in group}
                 for group in self.optimizer.param_groups for p in group["params"]}
        state = None if self.scheduler is None else self.scheduler.state_dict()
        return {"rates": rates, "groups": len(self.optimizer.param_groups), "scheduler": state, "class": self._schedule}

    @property
    def _schedule(self) -> str | None:
        """The scheduler's class."""
        return None if self.scheduler is None else type(self.scheduler).__name__

    def _set_rates(self, place: Path) -> None:
        """Go on with the checkpoint's learning rates, each written into its tensor where it is one."""
        found, names = _read(place / RATES), {id(p): name for name, p in self.authored.module.named_parameters()}
        if found["class"] != self._schedule:
            raise WorkbenchError(f"checkpoint {place}: its run had {_told(found['class'])}, and this one has "
                                 f"{_told(self._schedule)}: give train the same scheduler, or take another folder")
        groups = self.optimizer.param_groups
        if self.scheduler is not None:
            if found["groups"] != len(groups):
                raise WorkbenchError(f"checkpoint {place}: its scheduler had {found['groups']} groups of parameters, "
                                     f"and on this mesh there are {len(groups)}: resume on the mesh that saved it")
            self.scheduler.load_state_dict(found["scheduler"])
        for group in groups:
            rates = [found["rates"][names[id(p)]] for p in group["params"]]
            if any(other != rates[0] for other in rates):
                raise WorkbenchError(f"checkpoint {place}: parameters that share a group here had different learning "
                                     "rates: resume on the mesh that saved it")
            for key, rate in rates[0].items():
                if isinstance(group.get(key), torch.Tensor):
                    group[key].fill_(rate)
                else:
                    group[key] = rate

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()


_RATES = ("lr", "initial_lr")


def newest(folder: Path) -> Path | None:
    """The last complete checkpoint in `folder`, if there is one."""
    return max(folder.glob("step_*"), default=None)


def check_saving(recipe: Recipe, folder: Path | str | None, save_every: int | None) -> None:
    """Raise WorkbenchError, before any rank starts, where a run cannot save to `folder` or resume from it."""
    if save_every is not None and (isinstance(save_every, bool) or not isinstance(save_every, int) or save_every < 1):
        raise WorkbenchError(f"save_every {save_every!r}: give a whole number of steps, 1 or more")
    if folder is None:
        if save_every is not None:
            raise WorkbenchError(f"save_every {save_every} without a folder: say where the checkpoints go")
        return
    steps = taken(Path(folder), recipe)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WorkbenchError(f"checkpoints {folder}: the folder cannot be made: {error.strerror or error}") from error
    if steps >= recipe.training.steps:
        raise WorkbenchError(f"checkpoint {newest(Path(folder))}: it has taken {steps} steps, and training.steps is "
                             f"{recipe.training.steps}: set more steps, or take another folder")


def taken(folder: Path, recipe: Recipe) -> int:
    """How many steps the newest checkpoint in `folder` has taken, 0 where there is none; starts no rank.

    Raises WorkbenchError for what this recipe cannot resume from: a file, another model or learning rate, lost bytes.
    """
    if folder.exists() and not folder.is_dir():
        raise WorkbenchError(f"checkpoints {folder}: is a file: give a folder")
    place = newest(folder)
    if place is None:
        return 0
    about = _about(place)
    for kind, mine in _settings(recipe).items():
        for key in [*mine, *about[kind]]:
            there, here = about[kind].get(key), mine.get(key)
            if there != here:
                what, remedy = _KINDS[kind]
                raise WorkbenchError(f"checkpoint {place}: {what}: {kind}.{key} is {there!r} there and {here!r} in "
                                     f"recipe {recipe.name!r}: {remedy}, or another folder")
    return int(about["steps"])


def _about(place: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once its files have been found complete."""
    try:
        about: dict[str, Any] = json.loads((place / ABOUT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise damaged(place, f"it is half written: {ABOUT} is missing") from None
    except ValueError:
        raise damaged(place, f"{ABOUT} is no JSON") from None
    if about.get("format") != FORMAT:
        raise WorkbenchError(f"checkpoint {place}: it has format {about.get('format')}, and this workbench reads "
                             f"{FORMAT}: read it with the workbench that wrote it")
    for name, size in about["bytes"].items():
        have = (place / name).stat().st_size if (place / name).exists() else 0
        if have != size:
            raise damaged(place, f"{name} has {have:,} bytes, and {size:,} were written")
    return about


def damaged(place: Path, what: str) -> WorkbenchError:
    """The error for a checkpoint that cannot be read."""
    return WorkbenchError(f"checkpoint {place}: {what}: delete this folder, and training resumes from the checkpoint "
                          "before")


_KINDS = {"model": ("it is of another model", "take its recipe"),
          "training": ("a resumed run keeps its learning rate", "take the same")}


def _settings(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """What a run must have in common with the one that it resumes."""
    return {"model": {"family": recipe.model.family, **recipe.model.sizes()}, "training": {"lr": recipe.training.lr}}


def _read(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # what a damaged file raises is of many types
        raise damaged(file.parent, f"{file.name} cannot be read ({type(error).__name__})") from error
    return found


def _write(file: Path, value: dict[str, Any]) -> None:
    """`torch.save` of a small value; the error of a full disk keeps the system's words."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    file.write_bytes(buffer.getvalue())


def _why(error: BaseException) -> str:
    """One line; of what torch.distributed.checkpoint gathered, the error of the first rank that failed."""
    failures = getattr(error, "failures", {})
    first = next((cause for cause, _ in failures.values()), error)
    first = first.__context__ if isinstance(first.__context__, OSError) else first  # torch's writer hides it
    said = str(first).strip().splitlines() or [type(first).__name__]
    return getattr(first, "strerror", None) or full_disk(str(first)) or said[0]


def _told(name: str | None) -> str:
    return f"scheduler {name}" if name is not None else "no scheduler"


def _sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
