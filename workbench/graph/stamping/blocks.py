"""Which blocks of a model are alike, judged by the modules themselves, before anything is captured."""

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
"""Stamping pays where it leaves so many blocks uncaptured: the comparison costs about a third of one."""


@dataclass(frozen=True)
class AlikeBlocks:
    """kept: the blocks that are captured, by number. Of these, numbers `lower` and lower + 1 of the small module are
    the alike ones that the `extra` others are stamped from.
    """

    kept: tuple[int, ...]
    lower: int
    extra: int


def find_run(module: nn.Module) -> AlikeBlocks:
    """The longest row of alike blocks; of these the first is captured too, and a block behind them.

    Raises NotAlike, with the reason, where there is none that is worth it.
    """
    if not isinstance(module, Decoder) or type(module).forward is not Decoder.forward or "forward" in vars(module):
        name = type(module).__name__
        raise NotAlike(f"{name} has a forward of its own: whether it treats its layers alike is unknown")
    blocks = list(module.layers)
    differences = [difference(a, b, f"layers.{i}") for i, (a, b) in enumerate(pairwise(blocks), 1)]
    cuts = [-1, *(i for i, why in enumerate(differences) if why), len(blocks) - 1]
    rows = [(a + 1, b + 1) for a, b in pairwise(cuts)]
    start, stop = max(rows, key=lambda row: row[1] - row[0])
    # one before: what all share goes by the name that it has in the first of them, as a mesh does
    lower, upper = start + 1, min(stop, len(blocks) - 1)
    extra = upper - lower - 2
    if extra < SAVED_LAYERS:
        least = f"{stop - start} of {len(blocks)} layers in a row are alike, which saves fewer than {SAVED_LAYERS}"
        raise NotAlike("; ".join([least, *filter(None, differences)]))
    _refuse_shared(module, range(start, stop))
    for path, part in blocks[lower].named_modules():  # the graph would tell, after a capture in vain
        if isinstance(part, MoE) and part.config.dispatch == "dropless":
            raise NotAlike(f"layers.{lower}.{path} is dropless: it reads sizes from the device, each layer its own")
    return AlikeBlocks((*range(lower + 2), *range(upper, len(blocks))), lower, extra)


def short(module: nn.Module, run: AlikeBlocks) -> nn.Module:
    """`module` with the kept blocks alone; everything in it is the original's."""
    made = copy.copy(module)
    blocks = list(module.layers)  # type: ignore[arg-type]
    made._modules = {**module._modules, "layers": nn.ModuleList(blocks[i] for i in run.kept)}
    return made


def _refuse_shared(module: nn.Module, row: Iterable[int]) -> None:
    """A parameter, a buffer or a module of an alike block that has a second name."""
    inside = tuple(f"layers.{i}." for i in row)
    first: dict[int, str] = {}
    named: list[tuple[str, Any]] = [*module.named_parameters(remove_duplicate=False),
                                    *module.named_buffers(remove_duplicate=False),
                                    *module.named_modules(remove_duplicate=False)]
    for name, item in named:
        other = first.setdefault(id(item), name)
        if other != name and (f"{name}.".startswith(inside) or f"{other}.".startswith(inside)):
            raise NotAlike(f"{name} is {other} too")


def difference(a: Any, b: Any, where: str) -> str:
    """In what two modules, or values of two modules, differ, so that a capture could; "" where they are alike."""
    return _difference(a, b, where, {})


def _difference(a: Any, b: Any, where: str, seen: dict[tuple[int, int], tuple[Any, Any]]) -> str:
    if a is b or (id(a), id(b)) in seen:
        return ""
    if type(a) is not type(b):
        return f"{where} is a {type(b).__name__}, and a {type(a).__name__} in the layer before"
    seen[id(a), id(b)] = a, b  # alive: an id is given again
    parts = _parts(a, b)
    if parts is None:
        one, two = (_face(x) if isinstance(x, torch.Tensor) else x for x in (a, b))
        return "" if _equal(one, two) else f"{where} is {two!r:.80}, and {one!r:.80} in the layer before"
    mine, theirs = parts
    if mine.keys() != theirs.keys():
        return f"{where} has {_keys(theirs, mine)}, and the layer before {_keys(mine, theirs)}"
    for one, two in zip(mine, theirs, strict=True):
        if one != two:  # a loop over them goes another way
            return f"{where} has {two} where the layer before has {one}: another order"
    found = (_difference(mine[k], theirs[k], where if k == "" else f"{where}.{k}", seen) for k in mine)
    return next(filter(None, found), "")


def _equal(one: Any, two: Any) -> bool:
    """False where that cannot be said, as of arrays."""
    try:
        return bool(one == two)
    except (ValueError, TypeError):
        return False


def _keys(have: Mapping[Any, Any], other: Mapping[Any, Any]) -> str:
    return ", ".join(str(k) for k in have if k not in other) or "no more"


def _parts(a: Any, b: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]] | None:
    """What a value is made of, by name; None for one that is compared as a whole."""
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
    """Attributes; hooks by their order, since the keys they are kept under count through the process."""
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
