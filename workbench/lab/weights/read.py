"""A model's weights from a local folder of Hugging Face safetensors. A rank reads only what it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, LoadPlan, Metadata, ReadItem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType

from workbench.errors import WorkbenchError
from workbench.lab.weights.hugging_face import FAMILIES, Place, misfit, place_of
from workbench.recipe.recipe import Recipe

CONFIG, CPU = "config.json", torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Slice:
    """What is read of one tensor of the files. bounds: start and length of each dim. rows: their order in `target`."""

    name: str
    bounds: tuple[tuple[int, int], ...]
    target: torch.Tensor
    rows: list[int] | None = None


@dataclass(frozen=True)
class Stored:
    """A whole parameter that lies in files: `narrow` chooses a part, and `clone` gives memory that `read` fills.

    bounds: start and length of each dim. slices: what `read` has to read, for all parameters.
    """

    place: Place
    bounds: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    slices: list[Slice]
    device: torch.device = CPU

    def narrow(self, dim: int, start: int, length: int) -> Stored:
        """Rows `start` to `start + length` of a dim, counted from the part chosen before."""
        bounds = list(self.bounds)
        bounds[dim] = (bounds[dim][0] + start, length)
        return replace(self, bounds=tuple(bounds))

    def to(self, device: torch.device, dtype: torch.dtype) -> Stored:
        """The same parameter, to be read onto a device in a dtype."""
        return replace(self, device=device, dtype=dtype)

    def clone(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """A tensor for the part, without values until `read`."""
        shape = [length for _, length in self.bounds]
        target = torch.empty(shape, dtype=self.dtype, device=self.device, memory_format=memory_format)
        if target.numel():
            self.slices.extend(self._slices(target))
        return target

    def _slices(self, target: torch.Tensor) -> Iterator[Slice]:
        (first, count), *inside = self.bounds
        if self.place.stacked:
            for name, expert in zip(self.place.names[first : first + count], target, strict=True):
                yield Slice(name, tuple(inside), expert)
        elif self.place.order is None:
            yield Slice(self.place.names[0], self.bounds, target)
        else:  # the rows lie close together, in another order
            rows = self.place.order[first : first + count]
            start, stop = min(rows), max(rows) + 1
            order = [row - start for row in rows]
            yield Slice(self.place.names[0], ((start, stop - start), *inside), target, order)


class _Planner(DefaultLoadPlanner):
    """Hands out memory for each slice, and puts the rows in order once it has been read."""

    def __init__(self, slices: list[Slice]) -> None:
        super().__init__()
        self.slices = slices

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._slice(read_item).target
        return torch.empty(read_item.lengths, dtype=target.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        part = self._slice(read_item)
        part.target.copy_(tensor if part.rows is None else tensor[part.rows])

    def _slice(self, item: ReadItem) -> Slice:
        return self.slices[int(item.dest_index.fqn)]


def _item(number: str, part: Slice) -> ReadItem:
    starts = torch.Size(start for start, _ in part.bounds)
    lengths = torch.Size(length for _, length in part.bounds)
    zeros = torch.Size([0] * len(part.bounds))
    return ReadItem(LoadItemType.TENSOR, MetadataIndex(number), zeros, MetadataIndex(part.name, zeros), starts, lengths)


class StoredWeights(dict[str, Stored | torch.Tensor]):
    """Each parameter of a model by name, and its persistent buffers as tensors."""

    def __init__(self, reader: HuggingFaceStorageReader, metadata: Metadata) -> None:
        super().__init__()
        self.reader, self.metadata, self.slices = reader, metadata, list[Slice]()

    def read(self) -> None:
        """Fill all tensors that `clone` gave."""
        plan = LoadPlan([_item(str(number), part) for number, part in enumerate(self.slices)])
        self.reader.set_up_storage_reader(self.metadata, True)
        self.reader.read_data(plan, _Planner(self.slices)).wait()
        self.slices.clear()


def stored_weights(recipe: Recipe, module: nn.Module) -> StoredWeights:
    """Every parameter and buffer of the recipe's model as it lies in the folder `model.weights`.

    module: the model, which may be on the meta device. WorkbenchError names the file or the tensor that does not fit,
    before anything is read but the files' headers.
    """
    family, sizes = recipe.model.family, recipe.model.sizes()
    folder = Path(recipe.model.weights or "")
    _check_config(folder, family, sizes)
    reader = HuggingFaceStorageReader(str(folder))
    metadata = _metadata(reader, folder)
    in_files = metadata.state_dict_metadata
    state = module.state_dict()
    parameters = {name for name, _ in module.named_parameters()}
    places = {name: place_of(name, tensor.shape, sizes) for name, tensor in state.items()}
    if sizes.get("score") == "softmax":  # DeepSeek-V2 has no bias for balance, and ours starts at zero
        places = {name: p for name, p in places.items() if name in parameters or p.names[0] in in_files}
    weights = StoredWeights(reader, metadata)
    for name, place in places.items():
        shape = state[name].shape
        for theirs in place.names:
            _check_tensor(folder, metadata, theirs, shape[place.stacked:], f"{name!r} of {family}")
        bounds = tuple((0, length) for length in shape)
        stored = Stored(place, bounds, state[name].dtype, weights.slices)
        weights[name] = stored if name in parameters else stored.clone()
    wanted = {theirs for place in places.values() for theirs in place.names}
    second_head = f"model.layers.{sizes['n_layers']}."  # DeepSeek-V3's second prediction head, which is left out here
    has_head = f"{second_head}eh_proj.weight" in in_files
    for theirs in sorted(in_files.keys() - wanted):
        left_out = theirs.endswith("rotary_emb.inv_freq") or (has_head and theirs.startswith(second_head))
        if not left_out:
            raise WorkbenchError(f"weights {_file(metadata, theirs)}: tensor {theirs!r} has no place in {family} of "
                                 f"{sizes['n_layers']} layers: take the weights of this model, or another flavor")
    weights.read()  # buffers
    return weights


def _check_tensor(folder: Path, metadata: Metadata, name: str, shape: torch.Size, reader: str) -> None:
    """Raise WorkbenchError where the files have no such tensor for `reader`, or one of another shape or dtype."""
    stored: Any = metadata.state_dict_metadata.get(name)
    if stored is None:
        raise WorkbenchError(f"weights {folder}: tensor {name!r} is missing, which {reader} needs: take the weights of "
                             "this model with all their files, or another flavor")
    file = _file(metadata, name)
    if len(stored.chunks) > 1:
        raise WorkbenchError(f"weights {file}: tensor {name!r} is in another file, too: keep one of them")
    if stored.size != shape:
        raise WorkbenchError(f"weights {file}: tensor {name!r} has shape {list(stored.size)}, and {reader} takes "
                             f"{list(shape)}: set the sizes in model, or take other weights")
    if stored.properties.dtype not in DTYPES:
        raise WorkbenchError(f"weights {file}: tensor {name!r} is of {stored.properties.dtype}: convert it to bfloat16 "
                             "first")


def _file(metadata: Metadata, name: str) -> Path:
    """The file that holds a tensor."""
    dims = len(metadata.state_dict_metadata[name].size)  # type: ignore[union-attr]
    return Path(metadata.storage_data[MetadataIndex(name, [0] * dims)].relative_path)


def _metadata(reader: HuggingFaceStorageReader, folder: Path) -> Metadata:
    """Names, shapes, dtypes and files of the tensors. WorkbenchError names a file that cannot be read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WorkbenchError(f"weights {folder}: no such folder, or no .safetensors file in it: set model.weights to "
                             "a folder of Hugging Face safetensors")
    for file in files:
        try:
            safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise WorkbenchError(f"weights {file}: it is truncated, or no safetensors file ({error}): take it from its "
                                 "source again") from error
    return reader.read_metadata()


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
    if problem := misfit(family, sizes, config):
        raise WorkbenchError(f"weights {file}: {problem}")
