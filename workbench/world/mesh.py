"""`World`, the ranks as one of them sees them, and their layout on a device mesh."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.errors import WorkbenchError
from workbench.torch_api.distributed.dtensor import clear_dtensor_caches, ranks_of
from workbench.torch_api.distributed.fake import start_fake_process_group
from workbench.torch_api.ops import world_kind
from workbench.world.bounds import FAKE_RANKS

if TYPE_CHECKING:
    from workbench.recipe.sections import MeshSpec

AXES = ("dp_replicate", "dp_shard", "tp")
WorldKind = Literal["fake", "simulated", "gloo", "nccl"]
_MESHES: WeakKeyDictionary[Any, dict[Hashable, DeviceMesh]] = WeakKeyDictionary()


class WorldError(WorkbenchError):
    """There is no such world here, or it does not have the ranks that were asked for."""


@dataclass(frozen=True)
class World:
    """The ranks, seen from one of them.

    kind: "fake" (shapes only), "simulated" (every rank's values in this process), "gloo" or "nccl".
    size: number of ranks; rank: this rank. device: the device of this rank's tensors.
    fake_mode: the mode of this world's fake tensors, or None. pipeline: ranks of one, each with meshes of its own.
    """

    kind: WorldKind
    size: int
    rank: int
    device: torch.device
    fake_mode: Any = field(default=None, repr=False, compare=False)
    pipeline: int = field(default=1, repr=False)

    @property
    def is_fake(self) -> bool:
        """Whether tensors have shapes and no values."""
        return self.kind == "fake"

    def synchronise(self) -> None:
        """Wait until this rank's GPU has finished. Does nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mesh(self, spec: MeshSpec) -> DeviceMesh | None:
        """The mesh of `spec`, with the axes larger than 1 only, in the order dp_replicate, dp_shard, tp.

        None for a single rank. In a pipeline, that of the ranks with this rank's place in it. WorldError if the axes do
        not multiply to the number of ranks. Every rank must call it, in the same order: it creates process groups.
        """
        if spec.world_size * self.pipeline != self.size:
            sizes = " x ".join(f"{axis} {getattr(spec, axis)}" for axis in AXES)
            raise WorldError(
                f"mesh {sizes} needs {spec.world_size} ranks, and this {self.kind} world has {self.size}: "
                f"change the mesh, or start {spec.world_size} ranks"
            )
        mesh = self.mesh_of({"pp": self.pipeline, **{axis: getattr(spec, axis) for axis in AXES}})
        if mesh is None or self.pipeline == 1:
            return mesh
        return mesh[tuple(spec.axes)] if spec.axes else None

    def mesh_of(self, sizes: dict[str, int]) -> DeviceMesh | None:
        """A mesh of the axes in `sizes` (name to size) that are larger than 1; None if there are none."""
        axes = {name: size for name, size in sizes.items() if size > 1}
        if prod(axes.values()) != self.size:
            raise WorldError(
                f"mesh {axes} does not multiply to the {self.size} ranks of this {self.kind} world"
            )
        if not axes:
            return None
        return self._kept(tuple(axes.items()), lambda: init_device_mesh(
            self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)))

    def _kept(self, layout: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
        """Real ranks create one mesh per layout: a process group keeps its threads or communicators until it ends."""
        if self.kind in ("fake", "simulated"):
            return make()
        meshes = _MESHES.setdefault(dist.group.WORLD, {})
        if layout not in meshes:
            meshes[layout] = make()
        return meshes[layout]

    def expert_mesh(self, spec: MeshSpec) -> DeviceMesh | None:
        """A second mesh of the same ranks for experts: dp_replicate, ep, and ep_shard, over which FSDP shards them.

        Axes of size 1 are left out; None if none is left. Ranks of one ep group are neighbours on the axes that
        `spec.ep_over` names; ep_shard takes the other ranks of dp_shard, and of tp. Every rank must call it.
        """
        sizes = spec.expert_axes
        inner = spec.tp if spec.ep_over == "dp_shard" else 1
        outer = sizes["ep_shard"] // inner
        ranks = [
            [[((r * outer + o) * spec.ep + e) * inner + i for o in range(outer) for i in range(inner)]
             for e in range(spec.ep)]
            for r in range(spec.dp_replicate)
        ]
        axes = {name: size for name, size in sizes.items() if size > 1}
        if not axes:
            return None

        def make() -> DeviceMesh:
            # a mesh over all ranks would take the default group, which the other mesh may use
            if len(axes) == 1:
                group = dist.new_group(list(range(self.size)))
                return DeviceMesh.from_group(group, self.device.type, mesh_dim_names=tuple(axes))
            table = torch.tensor(ranks, dtype=torch.int).reshape(*axes.values())
            return DeviceMesh(self.device.type, table, mesh_dim_names=tuple(axes))

        return self._kept(("experts", inner, *axes.items()), make)


def axis_sizes(mesh: DeviceMesh | None) -> dict[str, int]:
    """Axis name to size; empty without a mesh."""
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh is not None else {}


def group_names(mesh: DeviceMesh | None) -> dict[str, str]:
    """Axis name to the name of this rank's process group; empty without a mesh."""
    if mesh is None:
        return {}
    return {axis: str(mesh.get_group(axis).group_name) for axis in axis_sizes(mesh)}


def coordinates(mesh: DeviceMesh | None, rank: int) -> dict[str, int]:
    """Axis name to the coordinate of `rank`, on a mesh over the whole world. Empty without a mesh."""
    place: dict[str, int] = {}
    if mesh is None:
        return place
    rank = ranks_of(mesh).index(rank)
    for axis, size in reversed(list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))):
        rank, place[axis] = divmod(rank, size)
    return place


def all_gather_object(value: Any) -> list[Any]:
    """The value of every rank, in rank order; this process's alone without other ranks. Every rank must call it."""
    if world_kind() in (None, "fake"):
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


_open_worlds: list[World] = []


def current_world() -> World:
    """The world of this process: the open fake or simulated one, or that of the default process group."""
    if _open_worlds:
        return _open_worlds[-1]
    if not dist.is_initialized():
        raise WorldError(
            "no world here: use `with fake_world(n)`, `with simulated_world(n)`, or run inside `ranks(n)` or torchrun"
        )
    # "nccl", or one backend for each type of device: "cpu:gloo,cuda:nccl"
    backends = {part.rpartition(":")[2] for part in dist.get_backend_config().split(",")}
    backend = "nccl" if "nccl" in backends and torch.cuda.is_available() else "gloo"
    if backend not in backends:
        raise WorldError(
            f"the default process group uses the backend {dist.get_backend()!r}; gloo and nccl are supported"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
        )
    return World(cast(WorldKind, backend), dist.get_world_size(), dist.get_rank(), device)


@contextmanager
def opened(caller: str, world: World) -> Iterator[World]:
    """Start the fake default process group of `world` and make it the current world; undo all of it afterwards.

    `caller` names the caller in errors. WorldError if a process group exists, or if size or rank is out of range.
    """
    if world.size < 1 or not 0 <= world.rank < world.size:
        raise WorldError(
            f"{caller}: need size >= 1 and 0 <= rank < size, not size {world.size} and rank {world.rank}"
        )
    if world.size > FAKE_RANKS:
        raise WorldError(
            f"{caller}: {world.size:,} ranks are more than the {FAKE_RANKS:,} that one process can lay out: "
            "make the mesh smaller"
        )
    if dist.is_initialized():
        raise WorldError(
            f"{caller} cannot start: this process already has a default process group "
            f"({dist.get_backend()}, {dist.get_world_size()} ranks). Leave that world first "
            "(the end of its `with` block, or torch.distributed.destroy_process_group())"
        )
    excepthook = sys.excepthook  # torch installs one that names the rank, and does not remove it
    try:
        start_fake_process_group(world.size, world.rank)
        _open_worlds.append(world)
        yield world
    finally:
        if world in _open_worlds:
            _open_worlds.remove(world)
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_dtensor_caches()
        sys.excepthook = excepthook
