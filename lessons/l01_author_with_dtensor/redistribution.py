"""The collectives that change a DTensor's placements, and the bytes that each of them moves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.debug import CommDebugMode

from workbench.errors import WorkbenchError
from workbench.torch_api.distributed.dtensor import local_shape
from workbench.torch_api.distributed.fake import new_fake_mode
from workbench.torch_api.ops import collective_kind, tensor_bytes
from workbench.world.fake import fake_world
from workbench.world.mesh import World


class Move(NamedTuple):
    """One collective over one mesh axis, with the bytes of one rank."""

    kind: str
    axis: str
    bytes_in: int
    bytes_out: int

    @property
    def counted(self) -> int:
        """The larger side; twice for an all-reduce, which is a reduce-scatter followed by an all-gather."""
        return max(self.bytes_in, self.bytes_out) * (2 if self.kind == "all_reduce" else 1)

    def __str__(self) -> str:
        return f"{self.kind.replace('_', '-')} over {self.axis}, {self.bytes_in:,} B in, {self.bytes_out:,} B out"


class CollectiveLog(CommDebugMode):
    """Inside, notes each functional collective as (kind, process group's name, bytes in, bytes out)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        kind = collective_kind(func)
        if kind is not None and result is not NotImplemented:  # which lets a DTensor take the operator apart
            names = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, str)]
            self.seen.append((kind, names[-1], tensor_bytes(args[0]), tensor_bytes(result)))
        return result


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Inside, torch does not warn of slow collectives: the caller lists them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def redistribution(tensor: DTensor, placements: Sequence[Placement]) -> list[Move]:
    """The collectives that `tensor.redistribute(placements=...)` launches on rank 0, in order; empty where none is.

    No values move: a fake tensor of the same shape is redistributed on a fake world of the mesh's size, or on the
    tensor's own mesh where a process group is open. Raises WorkbenchError for a wrong number of placements.
    """
    mesh = tensor.device_mesh
    if len(placements) != mesh.ndim:
        raise WorkbenchError(f"{len(placements)} placements for a mesh of {mesh.ndim} axes: give one for each")
    axes = list(mesh.mesh_dim_names or map(str, range(mesh.ndim)))
    sizes = dict(zip(axes, mesh.shape, strict=True))
    shape = local_shape(tuple(tensor.shape), mesh.shape, [0] * mesh.ndim, tensor.placements)
    world: contextlib.AbstractContextManager[World | None] = (
        contextlib.nullcontext() if dist.is_initialized() else fake_world(mesh.size()))
    with no_warnings(), world as opened:
        fake_mesh = mesh if opened is None else opened.mesh_of(sizes)
        assert fake_mesh is not None
        with new_fake_mode(), CollectiveLog() as log:
            local = torch.empty(shape, dtype=tensor.dtype)
            start = DTensor.from_local(local, fake_mesh, tensor.placements, run_check=False, shape=tensor.shape,
                                       stride=tensor.stride())
            start.redistribute(placements=list(placements))
        names = {fake_mesh.get_group(i).group_name: axis for i, axis in enumerate(axes)}
    return [Move(kind, names.get(group, group), sent, received) for kind, group, sent, received in log.seen]
