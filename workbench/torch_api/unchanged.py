"""Contexts that restore a module after a run of it or of its graphs, so that a check does not affect training."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.errors import WorkbenchError
from workbench.torch_api.determinism import same_random_numbers

Undo = Callable[[], None]


@contextlib.contextmanager
def unchanged(module: nn.Module, written: Collection[str] = (), batch: Sequence[Any] = ()) -> Iterator[None]:
    """Restore `module`, the tensors of `batch` and all random numbers at the end.

    This covers values and addresses of parameters and buffers, gradients (None inside), modes, and plain attributes:
    numbers, and the contents of containers, dataclasses and generators. A replay reads tensors at their addresses, so
    a written tensor gets its old values in place, and a replaced one is put back.

    written: names of the parameters whose values are copied. Copies of all would double a model's memory, and a forward
    writes a parameter only where the capture says so; version counters show that nothing wrote the others. Raises
    WorkbenchError, with the parameter's name, if something did.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    copied = {id(parameter) for name, parameter in parameters.items() if name in written}
    versions = {name: shard_of(p)._version for name, p in parameters.items() if id(p) not in copied}
    undo = _undo_of([module, *batch], copied)
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    with same_random_numbers():
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            lost = [name for name, version in versions.items() if shard_of(parameters[name])._version != version]
            for act in undo:
                act()
            for parameter, gradient in gradients:
                parameter.grad = gradient
    if lost:
        raise WorkbenchError(f"parameter {lost[0]!r} was written while a check ran the step, by something that the "
                             "capture of its forward did not see, such as a hook: its value is lost. Write parameters "
                             "in the forward or in the training loop, and build again")


@contextlib.contextmanager
def same_tensors(module: nn.Module) -> Iterator[None]:
    """Put parameters and buffers back at the end, without their values.

    An export leaves its own tensors in a module that is registered under two names.
    """
    held = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, parameters, buffers in held:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@contextlib.contextmanager
def kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of these tensors at the end, at the same addresses."""
    undo = [act for tensor in tensors for act in _undo_of_tensor(tensor, True)]
    try:
        yield
    finally:
        for act in undo:
            act()


def _undo_of(roots: Sequence[Any], copied: Collection[int]) -> list[Undo]:
    """The calls that restore everything reachable from `roots` through modules, containers and dataclasses."""
    undo: list[Undo] = []
    known: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    left = list(roots)
    while left:
        value = left.pop()
        if id(value) in known:
            continue
        known[id(value)] = value
        if isinstance(value, torch.Tensor):
            undo += _undo_of_tensor(value, not isinstance(value, nn.Parameter) or id(value) in copied)
        elif isinstance(value, dict):
            undo.append(partial(_refill_dict, value, dict(value)))
            left += value.values()
        elif isinstance(value, list | deque | set):
            undo.append(partial(_refill, value, list(value)))
            left += value
        elif isinstance(value, tuple):
            left += value
        elif isinstance(value, nn.Module) or (dataclasses.is_dataclass(value) and hasattr(value, "__dict__")
                                              and not isinstance(value, type)):
            left.append(vars(value))
        elif isinstance(value, random.Random):
            undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            undo.append(partial(value.set_state, value.get_state()))  # type: ignore[arg-type]
    return undo


def _refill_dict(held: dict[Any, Any], items: dict[Any, Any]) -> None:
    if list(held) != list(items) or any(held[key] is not value for key, value in items.items()):
        held.clear()
        held.update(items)


def _refill(held: Any, items: list[Any]) -> None:
    if list(map(id, held)) != list(map(id, items)):
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(items)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's shard of a DTensor; a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _undo_of_tensor(tensor: torch.Tensor, values: bool) -> list[Undo]:
    local = shard_of(tensor)
    if local.layout is not torch.strided or local.is_meta:
        return []
    place = local.detach()
    storage = place.untyped_storage()
    return [partial(_put_back, local, place, storage.clone() if values else None)]


def _put_back(local: torch.Tensor, place: torch.Tensor, values: torch.UntypedStorage | None) -> None:
    """Restore the storage, not the tensor: for any dtype and overlapping views, and with the same version counter."""
    storage = place.untyped_storage()
    if values is not None:
        if storage.nbytes() != values.nbytes():
            storage.resize_(values.nbytes())
        storage.copy_(values)
    moved = local.data_ptr() != place.data_ptr() or local.dtype != place.dtype
    if moved or (local.shape, local.stride()) != (place.shape, place.stride()):
        local.data = place
