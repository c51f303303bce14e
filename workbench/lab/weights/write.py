"""Write a model's weights as a folder of Hugging Face safetensors, which transformers reads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from workbench.authoring.authored import Authored
from workbench.errors import WorkbenchError
from workbench.lab.weights.hugging_face import FAMILIES, Place, config_of, place_of
from workbench.lab.weights.read import CONFIG
from workbench.recipe.files import write_whole

FILE_BYTES = 5 * 10**9


def save_weights(authored: Authored, folder: Path | str, *, file_bytes: int = FILE_BYTES) -> None:
    """Write the model's weights as transformers names them: safetensors with an index, and config.json.

    Every rank calls it. Rank 0 holds the whole model in host memory, and writes files of about `file_bytes` bytes.
    WorkbenchError for a model of another family, and for a folder that holds anything already.
    """
    recipe, folder, first = authored.recipe, Path(folder).absolute(), authored.world.rank == 0
    if recipe is None or recipe.model.family not in FAMILIES:
        raise WorkbenchError(f"save_weights takes a model that a recipe of {', '.join(FAMILIES)} made")
    if authored.world.kind not in ("gloo", "nccl"):
        raise WorkbenchError(f"save_weights: a {authored.world.kind} world has no weights to write: take real ranks")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkbenchError(f"save_weights {folder}: there is something already: give a new or an empty folder")
    if dist.is_initialized():
        dist.barrier()
    sizes, tensors = recipe.model.sizes(), dict[str, torch.Tensor]()
    for name, tensor in authored.module.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if first:
            tensors |= _as_theirs(place_of(name, whole.shape, sizes), whole)
    if first:
        writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_files(tensors, file_bytes))
        with warnings.catch_warnings():  # that one process writes is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        dtype = next(iter(tensors.values())).dtype
        config = config_of(recipe.model.family, sizes) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        write_whole(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    if dist.is_initialized():
        dist.barrier()


def _files(tensors: dict[str, torch.Tensor], limit: int) -> dict[str, int]:
    """The number of the file that each tensor goes to, from 1."""
    numbers, number, size = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > limit:
            number, size = number + 1, 0
        numbers[name] = number
        size += tensor.nbytes
    return numbers


def _as_theirs(place: Place, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    if place.order is not None:
        whole = torch.empty_like(whole).index_copy_(0, torch.tensor(place.order, device=whole.device), whole)
    parts = whole.unbind(0) if place.stacked else (whole,)
    return {name: part.detach().cpu().contiguous() for name, part in zip(place.names, parts, strict=True)}
