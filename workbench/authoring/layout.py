"""The part of a parameter that a rank holds: cut first by tensor or expert parallelism, then by FSDP.

Both cut like torch.chunk (equal parts rounded up, the last ones smaller or empty), as DTensor expects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from workbench.authoring.plans import AuthoringError
from workbench.torch_api.distributed.dtensor import strided_shard
from workbench.world.mesh import axis_sizes


class Stored(Protocol):
    """A whole parameter that is not in memory. `clone` gives the part that `narrow` chose, maybe still without values.
    """

    def narrow(self, dim: int, start: int, length: int) -> Stored: ...

    def to(self, device: torch.device, dtype: torch.dtype) -> Stored: ...

    def clone(
        self, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor: ...


def part_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of `parts` of a dim of `size`."""
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(step, size - start)


@dataclass(frozen=True)
class Layout:
    """One parameter on a mesh. shape: the whole parameter's; cut_dim: the dim that `cut_axis` cuts, or None.

    tensor_parallel: whether the module expects a DTensor on the tp axis (also where the parameter is whole there).
    shard_axis, shard_dim: the mesh axis over which FSDP shards, and the dim that it cuts.
    """

    name: str
    shape: torch.Size
    cut_dim: int | None
    tensor_parallel: bool
    sizes: Mapping[str, int]
    cut_axis: str = "tp"
    shard_axis: str = "dp_shard"
    shard_dim: int = 0

    @classmethod
    def of(cls, name: str, param: torch.Tensor, mesh: DeviceMesh | None) -> Layout:
        """Read it from a parameter that is whole or, after `apply_tensor_plan`, a DTensor on the tp axis."""
        sizes = axis_sizes(mesh)
        if not isinstance(param, DTensor):
            return cls(name, param.shape, None, False, sizes)
        (placement,) = param.placements
        return cls(
            name, param.shape, placement.dim if isinstance(placement, Shard) else None, True, sizes
        )

    @classmethod
    def of_experts(cls, name: str, param: torch.Tensor, mesh: DeviceMesh) -> Layout:
        """A stack of experts on the expert mesh. FSDP cuts inside the experts where it cannot divide their number."""
        sizes = axis_sizes(mesh)
        count, left = divmod(param.shape[0], sizes.get("ep", 1))
        if left:
            raise AuthoringError(
                f"{param.shape[0]} experts of {name} cannot be spread evenly over ep {sizes['ep']}"
            )
        cut, within = (0 if "ep" in sizes else None), int(count % sizes.get("ep_shard", 1) > 0)
        return cls(name, param.shape, cut, False, sizes, "ep", "ep_shard", within)

    @property
    def sharded(self) -> bool:
        """Whether FSDP cuts it."""
        return self.sizes.get(self.shard_axis, 1) > 1

    def _cuts(self, at: Mapping[str, int], *axes: str) -> Iterator[tuple[int, int, int]]:
        """(dim, start, length) of the cuts over these axes, in order, each within what the cut before it has left."""
        shape = list(self.shape)
        for axis, dim in ((self.cut_axis, self.cut_dim), (self.shard_axis, self.shard_dim)):
            if axis in axes and self.sizes.get(axis, 1) > 1 and dim is not None:
                start, shape[dim] = part_bounds(shape[dim], self.sizes[axis], at[axis])
                yield dim, start, shape[dim]

    def local_shape(self, at: Mapping[str, int], *axes: str) -> torch.Size:
        """Shape of what the rank at the coordinate `at` holds, by the cuts over these axes, or by both."""
        shape = list(self.shape)
        for dim, _, length in self._cuts(at, *(axes or (self.cut_axis, self.shard_axis))):
            shape[dim] = length
        return torch.Size(shape)

    def local_part(self, whole: torch.Tensor | Stored, at: Mapping[str, int]) -> torch.Tensor:
        """A copy of what the rank at the coordinate `at` holds of `whole`."""
        for dim, start, length in self._cuts(at, self.cut_axis, self.shard_axis):
            whole = whole.narrow(dim, start, length)
        return whole.clone(memory_format=torch.contiguous_format)

    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis, in the mesh's order, as FSDP2 states them."""
        # tensor parallelism cuts first, and its axis is the last one: FSDP's shards of dim 0 are strided
        strided = self.cut_axis == "tp" and self.cut_dim == self.shard_dim
        by_axis: dict[str, Placement] = {
            self.shard_axis: strided_shard(0, self.sizes["tp"])
            if strided
            else Shard(self.shard_dim),
            self.cut_axis: Replicate() if self.cut_dim is None else Shard(self.cut_dim),
        }
        return tuple(by_axis.get(axis, Replicate()) for axis in self.sizes)
