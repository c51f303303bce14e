"""Contexts that restore tensors after a run of a module or of its graphs, so that a check does not affect training."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.torch_api.determinism import same_random_numbers


@contextlib.contextmanager
def restoring_module(module: nn.Module, written: Collection[str] = ()) -> Iterator[None]:
    """Restore buffers, gradients (None inside), random numbers, and the parameters among the names in `written`.

    A replay reads tensors at their addresses, so they get their old values in place. Copies of all parameters would
    double a model's memory, and a forward writes a parameter only where the capture says so. Attributes that the
    forward assigns in Python stay as they are.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    copied = [parameter for name, parameter in parameters.items() if name in written]
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    with same_random_numbers(), same_tensors(module), restoring([*copied, *module.buffers()]):
        for parameter in parameters.values():
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextlib.contextmanager
def same_tensors(module: nn.Module) -> Iterator[None]:
    """Put parameters and buffers back at the end, without their values.

    A forward may assign a buffer, and an export leaves its own tensors in a module with two names.
    """
    tables = [(part, dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, parameters, buffers in tables:
            part._parameters.update(parameters)
            part._buffers.update(buffers)


@contextlib.contextmanager
def restoring(tensors: Iterable[torch.Tensor], *, on_host: bool = False) -> Iterator[None]:
    """Restore the values of these tensors at the end, at the same addresses. on_host: where a GPU's copies lie."""
    storages = [shard_of(tensor).detach().untyped_storage() for tensor in tensors]
    copies = [
        storage.cpu() if on_host and storage.device.type != "cpu" else storage.clone()
        for storage in storages
    ]
    try:
        yield
    finally:
        for storage, copy in zip(storages, copies, strict=True):
            # storage, not tensor: for any dtype and view, and the version counter stays
            storage.copy_(copy)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's shard of a DTensor; a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
