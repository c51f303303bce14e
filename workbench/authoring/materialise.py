"""Turns a module on the meta device into shards: with values on a real world, with shapes only on a fake one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.authoring.layout import Layout, Stored
from workbench.authoring.plans import AuthoringError
from workbench.authoring.simple_fsdp import strided
from workbench.torch_api.distributed.simulated import is_per_rank, make_per_rank, per_rank_values
from workbench.world.mesh import World, coordinates

Initialise = Callable[[str, torch.Tensor, torch.Generator], None]


def default_initialise(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a whole parameter in place: matrices normal(0, 0.02), vectors 1 if named "weight", else 0."""
    if tensor.ndim >= 2:
        tensor.normal_(0.0, 0.02, generator=generator)
    else:
        tensor.fill_(1.0 if name.endswith("weight") else 0.0)


def seed_of(seed: int, name: str) -> int:
    """A seed for one parameter that does not depend on the mesh, the order or the process."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def whole_parameter(
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    initialise: Initialise,
    values: Mapping[str, Stored | torch.Tensor],
) -> torch.Tensor | Stored:
    """The unsharded parameter: from `values` by name, maybe still in a file, or drawn from a seed of its name."""
    if layout.name in values:
        value = values[layout.name]
        if isinstance(value, torch.Tensor) and is_per_rank(value):
            value = per_rank_values(value)[0]
        return value.to(device=device, dtype=dtype)
    # always drawn in float32, so that float64 and float32 models start from the same numbers
    whole = torch.empty(layout.shape, dtype=torch.float32, device=device)
    generator = torch.Generator(device).manual_seed(seed_of(seed, layout.name))
    with torch.no_grad():
        initialise(layout.name, whole, generator)
    return whole.to(dtype)


def stored_parameter(
    layout: Layout, world: World, mesh: DeviceMesh | None, dtype: torch.dtype,
    whole: Callable[[], torch.Tensor | Stored],
) -> nn.Parameter:
    """This rank's part as a frozen parameter: a DTensor on `mesh`, or plain. A fake world does not call `whole`."""
    if world.fake_mode is not None:
        shape = layout.local_shape(coordinates(mesh, world.rank))
        with world.fake_mode:
            local = torch.empty(shape, dtype=dtype, device=world.device)
    elif world.kind == "simulated":
        once = cache(whole)
        local = make_per_rank(
            lambda rank: layout.local_part(once(), coordinates(mesh, rank)), range(world.size)
        )
    else:
        local = layout.local_part(whole(), coordinates(mesh, world.rank))
    if mesh is None:
        return nn.Parameter(local, requires_grad=False)
    shape, stride = strided(layout.shape)
    with torch.no_grad():
        stored = DTensor.from_local(
            local, mesh, layout.placements(), run_check=False, shape=shape, stride=stride
        )
    return nn.Parameter(stored, requires_grad=False)


def fill_buffers(module: nn.Module, world: World, values: Mapping[str, Any]) -> None:
    """Give buffers the values that the module was built with, or that its `reset_buffers(device)` computes.

    AuthoringError names a buffer that has neither.
    """
    for path, part in module.named_modules():
        names = {
            name: f"{path}.{name}".lstrip(".") for name, _ in part.named_buffers(recurse=False)
        }
        if all(full in values for full in names.values()):
            for name, full in names.items():
                value = values[full].to(world.device)
                part._buffers[name] = (
                    value if world.fake_mode is None else world.fake_mode.from_tensor(value)
                )
            continue
        reset: Any = getattr(part, "reset_buffers", None)
        if reset is None:
            raise AuthoringError(
                f"buffer {next(iter(names.values()))!r} is on the meta device and has no values: build the module "
                f"with values, or give {type(part).__name__} a method reset_buffers(device) that sets them"
            )
        with world.fake_mode or nullcontext():
            reset(world.device)
