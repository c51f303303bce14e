"""Private names of DTensor and DeviceMesh that authoring needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed import device_mesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import debug as dtensor_debug
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["clear_dtensor_caches", "local_shape", "open_meshes", "strided_shard"]


def local_shape(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Shape of what the rank at `coordinate` of a mesh of that shape holds of a DTensor; no mesh is made."""
    return tuple(_compute_local_shape_and_global_offset(tuple(shape), tuple(mesh), list(coordinate), placements)[0])


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Shard `dim` over an axis that stands left of an axis which splits the same dim `split_factor` ways first."""
    return _StridedShard(dim, split_factor=split_factor)


def clear_dtensor_caches() -> None:
    """Forget every cached sharding decision and open mesh: both hold meshes of process groups that are gone."""
    for name in (
        "_clear_fast_path_sharding_prop_cache",  # C++ cache, from 2.10 on
        "_clear_python_sharding_prop_cache",
        "_clear_sharding_prop_cache",
    ):
        clear = getattr(dtensor_debug, name, None)
        if clear is not None:
            clear()
    device_mesh._mesh_resources.mesh_stack.clear()


def open_meshes() -> int:
    """How many meshes are open as context managers: none once a world is left."""
    return len(device_mesh._mesh_resources.mesh_stack)
