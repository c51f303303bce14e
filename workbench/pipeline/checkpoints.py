"""Checkpoints of a training run: written whole or not at all, and read onto any mesh.

    folder/step_00000004/   parameters, buffers and optimizer by torch.distributed.checkpoint, a file of random state
                            for each rank, and about.json, which is written last
    folder/.saving/         a checkpoint that is being written; renamed when it is complete
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from workbench.authoring.author import Authored
from workbench.errors import WorkbenchError
from workbench.graph.update import STATE, scalar_dtype
from workbench.graph.whole_step import WholeStep
from workbench.recipe.recipe import Recipe

ABOUT, SAVING, FORMAT = "about.json", ".saving", 1


class Checkpoints:
    """The checkpoints of one run in `folder`, which all ranks share. Every rank calls each method.

    step: the WholeStep that trains, or None where `optimizer` steps by itself.
    """

    def __init__(self, folder: Path | str, authored: Authored, optimizer: torch.optim.Optimizer,
                 step: WholeStep | None = None):
        self.folder, self.authored, self.optimizer, self.step = Path(folder).absolute(), authored, optimizer, step
        assert authored.recipe is not None
        self.recipe: Recipe = authored.recipe

    def complete(self) -> list[Path]:
        """The checkpoints that can be resumed from, oldest first."""
        return sorted(self.folder.glob("step_*"))

    def resume(self) -> int:
        """Read the newest checkpoint, and return the number of steps it has taken: 0 where there is none.

        Raises WorkbenchError for a checkpoint of another model, or one that lost bytes.
        """
        found = self.complete()
        if not found:
            return 0
        about = self._about(found[-1])
        state = self._state()
        try:
            dcp.load(state, checkpoint_id=str(found[-1]), no_dist=not dist.is_initialized())
        except (Exception, dcp.CheckpointException) as error:  # what a damaged file raises is of many types
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise self._damaged(found[-1], f"torch.distributed.checkpoint cannot read it ({said[-1]})") from error
        self._set_random(found[-1])
        return int(about["steps"])

    def save(self, steps: int) -> Path:
        """Write a checkpoint after `steps` steps; earlier ones stay."""
        rank, saving, place = self.authored.world.rank, self.folder / SAVING, self.folder / f"step_{steps:08d}"
        try:
            if rank == 0:
                shutil.rmtree(saving, ignore_errors=True)
                saving.mkdir(parents=True)
            self._barrier()
            dcp.save(self._state(), checkpoint_id=str(saving), no_dist=not dist.is_initialized())
            torch.save(_random(), saving / f"random_{rank}.pt")
            self._barrier()
            if rank == 0:
                self._finish(saving, place, steps)
            self._barrier()
        except OSError as error:
            raise WorkbenchError(f"checkpoint {place}: it cannot be written: {error.strerror or error}") from error
        return place

    def _finish(self, saving: Path, place: Path, steps: int) -> None:
        """Make the files durable, say what they are, and give the checkpoint its name in one step."""
        sizes = {}
        for file in sorted(saving.iterdir()):
            sizes[file.name] = file.stat().st_size
            _sync(file)
        about = {"format": FORMAT, "steps": steps, "model": _model(self.recipe), "ranks": self.authored.world.size,
                 "bytes": sizes}
        (saving / ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        _sync(saving / ABOUT)
        shutil.rmtree(place, ignore_errors=True)
        saving.rename(place)
        _sync(self.folder)

    def _about(self, place: Path) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._damaged(place, f"it is half written: {ABOUT} is missing") from None
        except ValueError:
            raise self._damaged(place, f"{ABOUT} is no JSON") from None
        if about.get("format") != FORMAT:
            raise WorkbenchError(f"checkpoint {place}: it has format {about.get('format')}, and this workbench reads "
                                 f"{FORMAT}: read it with the workbench that wrote it")
        mine = _model(self.recipe)
        for key in [*mine, *about["model"]]:
            there, here = about["model"].get(key), mine.get(key)
            if there != here:
                raise WorkbenchError(f"checkpoint {place}: it is of another model: model.{key} is {there!r} there and "
                                     f"{here!r} in recipe {self.recipe.name!r}: take its recipe, or another folder")
        for name, size in about["bytes"].items():
            have = (place / name).stat().st_size if (place / name).exists() else 0
            if have != size:
                raise self._damaged(place, f"{name} has {have:,} bytes, and {size:,} were written")
        return about

    def _damaged(self, place: Path, what: str) -> WorkbenchError:
        return WorkbenchError(f"checkpoint {place}: {what}: delete this folder, and training resumes from the "
                              "checkpoint before")

    def _state(self) -> dict[str, Any]:
        """What is saved, by name; `dcp.load` writes into these tensors in place."""
        module = self.authored.module
        if self.step is not None:
            self.step.take_state()
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

    def _set_random(self, place: Path) -> None:
        """Each rank goes on with its own random numbers; on another number of ranks there are none to go on with."""
        file = place / f"random_{self.authored.world.rank}.pt"
        if not file.exists():
            return
        state = torch.load(file, weights_only=True)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()


def _random() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": cuda}


def _model(recipe: Recipe) -> dict[str, Any]:
    return {"family": recipe.model.family, **recipe.model.sizes()}


def _sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
