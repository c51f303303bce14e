"""Worlds: their meshes, what they refuse, and what they leave behind."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from workbench import fake_world, simulated_world
from workbench.recipe.sections import MeshSpec
from workbench.world.mesh import WorldError, coordinates, current_world

pytestmark = pytest.mark.compat


def test_mesh_has_the_axes_larger_than_one_in_order():
    with fake_world(8) as world:
        mesh = world.mesh(MeshSpec(dp_replicate=2, tp=4))
        assert mesh is not None
        assert mesh.mesh_dim_names == ("dp_replicate", "tp")
        assert tuple(mesh.shape) == (2, 4)
    for rank in range(8):
        with fake_world(8, rank) as world:
            mesh = world.mesh(MeshSpec(dp_replicate=2, dp_shard=2, tp=2))
            assert [coordinates(mesh, rank)[axis] for axis in mesh.mesh_dim_names] == list(mesh.get_coordinate())


def test_one_rank_has_no_mesh_and_a_mesh_that_does_not_fit_the_world_is_refused_with_the_numbers():
    with fake_world(1) as world:
        assert world.mesh(MeshSpec()) is None and coordinates(None, 0) == {}
    with fake_world(4) as world, pytest.raises(WorldError) as error:
        world.mesh(MeshSpec(dp_shard=2, tp=4))
    assert str(error.value) == (
        "mesh dp_replicate 1 x dp_shard 2 x tp 4 needs 8 ranks, and this fake world has 4: "
        "change the mesh, or start 8 ranks"
    )


def test_the_open_world_is_current_and_no_other():
    with pytest.raises(WorldError, match="no world here"):
        current_world()
    with fake_world(8, rank=3) as world:
        assert current_world() is world
        assert (world.kind, world.size, world.rank, world.is_fake) == ("fake", 8, 3, True)
    with pytest.raises(WorldError, match="no world here"):
        current_world()


@pytest.mark.parametrize("open_world", [fake_world, simulated_world])
def test_a_second_world_is_refused_and_the_first_stays(open_world):
    with fake_world(4) as world:
        with pytest.raises(WorldError) as error, open_world(8):
            pass
        assert str(error.value) == (
            f"{open_world.__name__} cannot start: this process already has a default process group (fake, 4 ranks). "
            "Leave that world first (the end of its `with` block, or torch.distributed.destroy_process_group())"
        )
        assert current_world() is world
        assert dist.get_world_size() == 4


def test_numbers_that_make_no_world_are_refused():
    for size, rank in ((0, 0), (4, 4), (4, -1)):
        with pytest.raises(WorldError, match=f"not size {size} and rank {rank}"), fake_world(size, rank):
            pass
    assert not dist.is_initialized()


@pytest.mark.parametrize("open_world", [fake_world, simulated_world])
def test_nothing_is_left_behind_even_after_an_error(open_world):
    before = (dict(os.environ), sys.excepthook, torch.get_default_device(), torch.get_rng_state().tolist())
    with pytest.raises(ZeroDivisionError), open_world(4) as world:
        mesh = world.mesh(MeshSpec(dp_shard=4))
        whole = DTensor.from_local(torch.ones(2), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        assert whole.to_local().shape == (8,)
        1 / 0  # noqa: B018
    after = (dict(os.environ), sys.excepthook, torch.get_default_device(), torch.get_rng_state().tolist())
    assert before == after
    assert not dist.is_initialized()
    assert device_mesh._mesh_resources.mesh_stack == []


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo,cuda:gloo"])
def test_a_world_is_known_where_each_type_of_device_has_a_backend_of_its_own(backend):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = current_world()
        has_nccl = backend is None and torch.cuda.is_available()
        assert (world.kind, world.size, world.device.type) == (("nccl", 1, "cuda") if has_nccl else ("gloo", 1, "cpu"))
    finally:
        dist.destroy_process_group()
