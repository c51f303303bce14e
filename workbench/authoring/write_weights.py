"""Write a model's weights as a folder of Hugging Face safetensors, which transformers reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from workbench.authoring.authored import Authored
from workbench.authoring.hugging_face import FAMILIES, Named, their_config, their_place
from workbench.authoring.read_weights import CONFIG, INDEX
from workbench.errors import WorkbenchError
from workbench.recipe.files import write_whole

ALONE = "model.safetensors"
FILE_BYTES = 5 * 10**9


def save_weights(authored: Authored, folder: Path | str, *, file_bytes: int = FILE_BYTES) -> list[Path]:
    """Write the model's weights as transformers names them: safetensors with an index, and config.json.

    Every rank calls it. Rank 0 holds the tensors of one file, of about `file_bytes` bytes, and writes them. Gives the
    files. WorkbenchError for a model of another family, and for a folder that holds anything already.
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
    sizes, kept = recipe.model.sizes(), authored.module.state_dict()
    names = list(_shared_out(kept, file_bytes))
    written, places, files = 0, dict[str, str](), list[Path]()
    for number, group in enumerate(names, 1):
        file = folder / (f"model-{number:05d}-of-{len(names):05d}.safetensors" if len(names) > 1 else ALONE)
        held: dict[str, torch.Tensor] = {}
        for name in group:
            whole = kept[name].detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            if first:
                held |= _as_theirs(their_place(name, whole.shape, sizes), whole)
        places |= dict.fromkeys(held, file.name)
        written += sum(tensor.nbytes for tensor in held.values())
        files.append(file)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(held, file, metadata={"format": "pt"})
    if first:
        index = {"metadata": {"total_size": written}, "weight_map": places}
        dtype = {"torch_dtype": str(next(iter(kept.values())).dtype).removeprefix("torch.")}
        for path, value in ((CONFIG, their_config(recipe.model.family, sizes) | dtype), (INDEX, index)):
            write_whole(folder / path, json.dumps(value, indent=2) + "\n")
    if dist.is_initialized():
        dist.barrier()
    return [*files, folder / CONFIG, folder / INDEX]


def _shared_out(kept: Mapping[str, torch.Tensor], limit: int) -> Iterator[list[str]]:
    """The tensors of each file, in the module's order."""
    group: list[str] = []
    size = 0
    for name, tensor in kept.items():
        more = math.prod(tensor.shape) * tensor.dtype.itemsize
        if group and size + more > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    yield group


def _as_theirs(place: Named, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    if place.order is not None:
        whole = torch.empty_like(whole).index_copy_(0, torch.tensor(place.order, device=whole.device), whole)
    parts = whole.unbind(0) if place.stacked else (whole,)
    return {name: part.to("cpu", copy=True).contiguous() for name, part in zip(place.names, parts, strict=True)}
