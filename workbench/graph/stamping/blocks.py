"""The alike blocks of a model, found by comparing its modules before anything is captured."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.authoring.models.decoder import Decoder
from workbench.authoring.models.moe import MoE
from workbench.errors import NotAlike

SAVED_LAYERS = 2
"""Stamping pays from this number of uncaptured blocks on: the comparison costs about a third of one block."""


@dataclass(frozen=True)
class AlikeBlocks:
    """A run of alike blocks. kept: the numbers of the captured blocks.

    Blocks `lower` and lower + 1 of the short module are compared; `extra` copies of the first go between them.
    """

    kept: tuple[int, ...]
    lower: int
    extra: int


def find_run(module: nn.Module) -> AlikeBlocks:
    """The longest run of alike blocks. Its first block, and one block after the run, are captured too.

    Raises NotAlike, with the reason, where no run is long enough.
    """
    if not isinstance(module, Decoder) or type(module).forward is not Decoder.forward or "forward" in vars(module):
        name = type(module).__name__
        raise NotAlike(f"{name} has a forward of its own: whether it treats its layers alike is unknown")
    blocks = list(module.layers)
    differences = [difference(a, b, f"layers.{i}") for i, (a, b) in enumerate(pairwise(blocks), 1)]
    cuts = [-1, *(i for i, why in enumerate(differences) if why), len(blocks) - 1]
    rows = [(a + 1, b + 1) for a, b in pairwise(cuts)]
    start, stop = max(rows, key=lambda row: row[1] - row[0])
    # not the first block of the run: a shared object, such as a mesh, is named after the block that uses it first
    lower, upper = start + 1, min(stop, len(blocks) - 1)
    extra = upper - lower - 2
    if extra < SAVED_LAYERS:
        least = f"{stop - start} of {len(blocks)} layers in a row are alike, which saves fewer than {SAVED_LAYERS}"
        raise NotAlike("; ".join([least, *filter(None, differences)]))
    _refuse_shared(module, range(start, stop))
    for path, part in blocks[lower].named_modules():  # the graph would show it only after a useless capture
        if isinstance(part, MoE) and part.config.dispatch == "dropless":
            raise NotAlike(f"layers.{lower}.{path} is dropless: it reads sizes from the device, each layer its own")
    return AlikeBlocks((*range(lower + 2), *range(upper, len(blocks))), lower, extra)


def short(module: nn.Module, run: AlikeBlocks) -> nn.Module:
    """`module` with the kept blocks only. It shares all its parts with the original."""
    made = copy.copy(module)
    blocks = list(module.layers)  # type: ignore[arg-type]
    made._modules = {**module._modules, "layers": nn.ModuleList(blocks[i] for i in run.kept)}
    return made


def _refuse_shared(module: nn.Module, row: Iterable[int]) -> None:
    """Raise NotAlike for a parameter, buffer or module of an alike block that has a second name."""
    inside = tuple(f"layers.{i}." for i in row)
    first: dict[int, str] = {}
    named: list[tuple[str, Any]] = [*module.named_parameters(remove_duplicate=False),
                                    *module.named_buffers(remove_duplicate=False),
                                    *module.named_modules(remove_duplicate=False)]
    for name, item in named:
        other = first.setdefault(id(item), name)
        if other != name and (f"{name}.".startswith(inside) or f"{other}.".startswith(inside)):
            raise NotAlike(f"{name} is {other} too")


def difference(a: Any, b: Any, where: str, seen: dict[tuple[int, int], tuple[Any, Any]] | None = None) -> str:
    """The first difference of two modules or values that a capture could see; "" where they are alike."""
    seen = {} if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return ""
    if type(a) is not type(b):
        return f"{where} is a {type(b).__name__}, and a {type(a).__name__} in the layer before"
    seen[id(a), id(b)] = a, b  # keeps both alive, since a later object may get the id of a dead one
    parts = _parts(a, b)
    if parts is None:
        one, two = (_face(x) if isinstance(x, torch.Tensor) else x for x in (a, b))
        return "" if _equal(one, two) else f"{where} is {two!r:.80}, and {one!r:.80} in the layer before"
    mine, theirs = parts
    if mine.keys() != theirs.keys():
        return f"{where} has {_keys(theirs, mine)}, and the layer before {_keys(mine, theirs)}"
    for one, two in zip(mine, theirs, strict=True):
        if one != two:  # a loop over them runs in another order
            return f"{where} has {two} where the layer before has {one}: another order"
    found = (difference(mine[k], theirs[k], where if k == "" else f"{where}.{k}", seen) for k in mine)
    return next(filter(None, found), "")


def _equal(one: Any, two: Any) -> bool:
    """False where the comparison has no single answer, as for arrays."""
    try:
        return bool(one == two)
    except (ValueError, TypeError):
        return False


def _keys(have: Mapping[Any, Any], other: Mapping[Any, Any]) -> str:
    return ", ".join(str(k) for k in have if k not in other) or "no more"


def _parts(a: Any, b: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]] | None:
    """The parts of two values by name; None for values that are compared as a whole."""
    if isinstance(a, nn.Module):
        return _module_parts(a), _module_parts(b)
    if isinstance(a, types.FunctionType):
        return _function_parts(a), _function_parts(b)
    if isinstance(a, types.MethodType):
        return {"": a.__func__, "self": a.__self__}, {"": b.__func__, "self": b.__self__}
    if isinstance(a, functools.partial):
        return ({"": x.func, "args": x.args, **x.keywords} for x in (a, b))  # type: ignore[return-value]
    if isinstance(a, Mapping):
        return a, b
    if isinstance(a, list | tuple):
        return dict(enumerate(a)), dict(enumerate(b))
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__") and not isinstance(a, type):
        return vars(a), vars(b)
    return None


def _module_parts(module: nn.Module) -> dict[str, Any]:
    """The attributes. Hooks are numbered by their order, since torch's keys for them count through the process."""
    parts: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            parts |= value
        else:
            parts[name] = list(value.values()) if "_hooks" in name and isinstance(value, dict) else value
    return parts


def _function_parts(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {"code": function.__code__, "defaults": function.__defaults__, "keywords": function.__kwdefaults__,
            "closure": [cell.cell_contents for cell in cells]}


def _face(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return (tuple(tensor.shape), tensor.stride(), tuple(local.shape), local.stride(), tensor.dtype, tensor.device,
            tensor.requires_grad, mesh)
