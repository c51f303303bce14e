"""Private names of DTensor and DeviceMesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor import debug as dtensor_debug
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def ranks_of(mesh: device_mesh.DeviceMesh) -> list[int]:
    """The ranks of a mesh in row-major order, also under a fake mode."""
    with unset_fake_temporarily():
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def local_shape(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[int, ...]:
    """The local shape of a DTensor on the rank at `coordinate` of a mesh of that shape. Creates no mesh."""
    return tuple(
        _compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh), list(coordinate), placements
        )[0]
    )


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Shard `dim` over an axis left of another axis that splits the same dimension `split_factor` ways first."""
    return _StridedShard(dim, split_factor=split_factor)


def clear_dtensor_caches() -> None:
    """Clear cached sharding decisions and open meshes, which hold meshes of destroyed process groups."""
    for name in (
        "_clear_fast_path_sharding_prop_cache",  # in C++
        "_clear_python_sharding_prop_cache",
        "_clear_sharding_prop_cache",
    ):
        clear = getattr(dtensor_debug, name, None)
        if clear is not None:
            clear()
    device_mesh._mesh_resources.mesh_stack.clear()
