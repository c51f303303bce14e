"""A model's weights from a local folder of Hugging Face safetensors. A rank reads only what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from workbench.authoring.hugging_face import FAMILIES, Named, misfit, their_place
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.recipe.recipe import Recipe

INDEX, CONFIG = "model.safetensors.index.json", "config.json"


@dataclass(frozen=True)
class Stored:
    """A whole tensor that lies in files: `narrow` chooses a part of it, and `clone` reads this part alone.

    pieces: the slices of safetensors, one, or one for each expert of a stack. bounds: start and length of each dim.
    """

    place: Named
    pieces: tuple[Any, ...]
    bounds: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: torch.device

    def narrow(self, dim: int, start: int, length: int) -> Stored:
        """Rows `start` to `start + length` of a dim, counted from the part chosen before."""
        bounds = list(self.bounds)
        bounds[dim] = (bounds[dim][0] + start, length)
        return replace(self, bounds=tuple(bounds))

    def to(self, device: torch.device, dtype: torch.dtype) -> Stored:
        """The same tensor, to be read onto a device in a dtype."""
        return replace(self, device=device, dtype=dtype)

    def clone(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """Read the part."""
        if not all(length for _, length in self.bounds):
            found = torch.empty([length for _, length in self.bounds])
        elif self.place.stacked:
            (first, count), *inside = self.bounds
            found = torch.stack([_read(piece, inside) for piece in self.pieces[first : first + count]])
        elif self.place.order is None:
            found = _read(self.pieces[0], self.bounds)
        else:  # the rows lie close together, in another order
            (first, count), *inside = self.bounds
            rows = self.place.order[first : first + count]
            start = min(rows)
            part = _read(self.pieces[0], [(start, max(rows) + 1 - start), *inside])
            found = part[[row - start for row in rows]]
        return found.to(device=self.device, dtype=self.dtype, copy=True, memory_format=memory_format)


def _read(piece: Any, bounds: Any) -> torch.Tensor:
    found: torch.Tensor = piece[tuple(slice(start, start + length) for start, length in bounds)]
    return found


def stored_weights(recipe: Recipe, module: nn.Module) -> dict[str, Stored | torch.Tensor]:
    """Every parameter of the recipe's model as it lies in the folder `model.weights`, and its buffers as tensors.

    module: the model, which may be on the meta device. WorkbenchError names the file or the tensor that does not fit,
    before anything is read but the files' headers.
    """
    family, sizes = recipe.model.family, recipe.model.sizes()
    folder = Path(recipe.model.weights or "")
    _check_config(folder, family, sizes)
    slices = dict(_slices(folder))
    cpu = torch.device("cpu")
    kept, parameters = module.state_dict(), dict(module.named_parameters())
    places = {name: their_place(name, tensor.shape, sizes) for name, tensor in kept.items()}
    if sizes.get("score") == "softmax":  # DeepSeek-V2 has no bias for balance, and ours starts at zero
        places = {name: p for name, p in places.items() if name in parameters or p.names[0] in slices}
    wanted = {theirs: name for name, place in places.items() for theirs in place.names}
    for theirs, name in wanted.items():
        if theirs not in slices:
            raise WorkbenchError(f"weights {folder}: tensor {theirs!r} is missing, which {name!r} of {family} needs: "
                                 "take the weights of this model, or another flavor")
        shape = tuple(kept[name].shape[places[name].stacked:])
        file, piece = slices[theirs]
        if tuple(piece.get_shape()) != shape:
            raise WorkbenchError(f"weights {file}: tensor {theirs!r} has shape {piece.get_shape()}, and "
                                 f"{name!r} of {family} takes {list(shape)}: set the sizes in model, or take other "
                                 "weights")
        if piece.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise WorkbenchError(f"weights {file}: tensor {theirs!r} is of dtype {piece.get_dtype()}: "
                                 "convert it to BF16 first")
    second_head = f"model.layers.{sizes['n_layers']}."  # DeepSeek-V3's second prediction head, which is left out here
    has_head = f"{second_head}eh_proj.weight" in slices
    for theirs, (file, _) in slices.items():
        known = theirs in wanted or theirs.endswith("rotary_emb.inv_freq")
        if not known and not (has_head and theirs.startswith(second_head)):
            raise WorkbenchError(f"weights {file}: tensor {theirs!r} has no place in {family} of {sizes['n_layers']} "
                                 "layers: take the weights of this model, or another flavor")
    found: dict[str, Stored | torch.Tensor] = {}
    for name, place in places.items():
        bounds = tuple((0, length) for length in kept[name].shape)
        stored = Stored(place, tuple(slices[each][1] for each in place.names), bounds, kept[name].dtype, cpu)
        found[name] = stored if name in parameters else stored.clone()
    return found


def _slices(folder: Path) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Each tensor's name, its file, and a slice of safetensors, which reads on demand."""
    index = folder / INDEX
    if index.exists():
        try:
            listed: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise WorkbenchError(f"weights {index}: it is no index of safetensors ({type(error).__name__}): write it "
                                 "again, or take the folder from its source again") from error
        for name, inside in listed.items():
            if not (folder / inside).is_file():
                raise WorkbenchError(f"weights {index}: it names {inside} for tensor {name!r}, and this file is "
                                     "missing: take it from the same source")
        files = [folder / file for file in sorted(set(listed.values()))]
    else:
        listed, files = {}, sorted(folder.glob("*.safetensors"))
    if not files:
        raise WorkbenchError(f"weights {folder}: no such folder, or no .safetensors file in it: set model.weights to "
                             "a folder of Hugging Face safetensors")
    seen: dict[str, Path] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WorkbenchError(f"weights {file}: it is truncated, or no safetensors file ({error}): take it from its "
                                 "source again") from error
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            if name in seen:
                raise WorkbenchError(f"weights {file}: tensor {name!r} is in {seen[name].name}, too: keep one of them")
            seen[name] = file
            yield name, (file, opened.get_slice(name))
    for name, listed_file in listed.items():
        if seen.get(name) != folder / listed_file:
            raise WorkbenchError(f"weights {index}: it names {listed_file} for tensor {name!r}, which is not in this "
                                 "file: take both from the same source")


def _check_config(folder: Path, family: str, sizes: Mapping[str, Any]) -> None:
    if family not in FAMILIES:
        raise WorkbenchError(f"model.weights is for {', '.join(FAMILIES)}, and the family is {family!r}: build its "
                             "module with values, or leave model.weights out")
    file = folder / CONFIG
    if not file.exists():
        return
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise WorkbenchError(f"weights {file}: it is no JSON: take it from its source again") from error
    if said := misfit(family, sizes, config):
        raise WorkbenchError(f"weights {file}: {said}")
