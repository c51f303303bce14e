"""Which part of a parameter a rank holds: first cut by tensor parallelism, then by FSDP on dim 0.

Both cut as torch.chunk does (equal parts rounded up, the last ones smaller or empty), which is what DTensor expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from workbench.parallel.plans import AuthoringError
from workbench.torch_api.dtensor import strided_shard


def part_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part `index` of `parts` of a dim of `size`."""
    step = -(-size // parts)
    start = min(size, step * index)
    return start, min(step, size - start)


@dataclass(frozen=True)
class Layout:
    """One parameter on a mesh. shape: the whole parameter's; tp_dim: the dim that tensor parallelism cuts, or None.

    tensor_parallel: whether the module expects a DTensor on the tp axis (also where it is whole on each rank).
    """

    name: str
    shape: torch.Size
    tp_dim: int | None
    tensor_parallel: bool
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, name: str, param: torch.Tensor, mesh: DeviceMesh | None) -> Layout:
        """Read it from a parameter that is whole or, after `apply_tensor_plan`, a DTensor on the tp axis."""
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) if mesh is not None else {}
        if not isinstance(param, DTensor):
            return cls(name, param.shape, None, False, sizes)
        (placement,) = param.placements
        if not placement.is_replicate() and not isinstance(placement, Shard):
            raise AuthoringError(f"parameter {name}: placement {placement} on the tp axis is not supported")
        return cls(name, param.shape, placement.dim if isinstance(placement, Shard) else None, True, sizes)

    @property
    def sharded(self) -> bool:
        """Whether FSDP cuts it: there is a dp_shard axis and a dim to cut."""
        return self.sizes.get("dp_shard", 1) > 1

    def tp_part(self, coordinate: Mapping[str, int]) -> tuple[torch.Size, tuple[int, int]]:
        """Shape of the tensor-parallel part at `coordinate`, and its start and length on tp_dim."""
        if self.tp_dim is None:
            return self.shape, (0, 0)
        start, length = part_bounds(self.shape[self.tp_dim], self.sizes["tp"], coordinate["tp"])
        shape = list(self.shape)
        shape[self.tp_dim] = length
        return torch.Size(shape), (start, length)

    def local_shape(self, coordinate: Mapping[str, int]) -> torch.Size:
        """Shape of what the rank at `coordinate` holds."""
        shape, _ = self.tp_part(coordinate)
        if not self.sharded:
            return shape
        _, length = part_bounds(shape[0], self.sizes["dp_shard"], coordinate["dp_shard"])
        return torch.Size((length, *shape[1:]))

    def local_part(self, whole: torch.Tensor, coordinate: Mapping[str, int]) -> torch.Tensor:
        """A copy of what the rank at `coordinate` holds of `whole`."""
        shape, bounds = self.tp_part(coordinate)
        part = whole if self.tp_dim is None else whole.narrow(self.tp_dim, *bounds)
        if self.sharded:
            part = part.narrow(0, *part_bounds(shape[0], self.sizes["dp_shard"], coordinate["dp_shard"]))
        return part.clone(memory_format=torch.contiguous_format)

    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis, in the mesh's order (dp_replicate, dp_shard, tp), as FSDP2 writes them."""
        by_axis: dict[str, Placement] = {
            # tensor parallelism cuts first though its axis stands last: FSDP's parts of dim 0 are strided
            "dp_shard": strided_shard(0, self.sizes["tp"]) if self.tp_dim == 0 else Shard(0),
            "tp": Replicate() if self.tp_dim is None else Shard(self.tp_dim),
        }
        return tuple(by_axis.get(axis, Replicate()) for axis in self.sizes)
