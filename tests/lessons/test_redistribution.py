"""A change of placements as collectives with their bytes: what DTensor does, counted by the tensor's size."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workbench.errors import WorkbenchError
from workbench.world.fake import fake_world
from workbench_lessons.l01_author_with_dtensor.redistribution import Move, redistribution


def tensor(placements, sizes=None):
    """16 x 8 float32 (512 bytes), after its world has closed."""
    sizes = sizes or {"tp": 4}
    with fake_world(4) as world:
        mesh = world.mesh_of(sizes)
        return DTensor.from_local(torch.empty(16, 8), mesh, placements, run_check=False, shape=torch.Size([16, 8]),
                                  stride=(8, 1))


@pytest.mark.parametrize(("start", "wanted", "moves"), [
    (Shard(0), Replicate(), [Move("all_gather", "tp", 128, 512)]),
    (Partial(), Replicate(), [Move("all_reduce", "tp", 512, 512)]),
    (Partial(), Shard(0), [Move("reduce_scatter", "tp", 512, 128)]),
    (Replicate(), Shard(1), []),
])
def test_one_axis(start, wanted, moves):
    assert redistribution(tensor([start]), [wanted]) == moves


def test_an_all_reduce_counts_as_its_two_halves():
    one, = redistribution(tensor([Partial()]), [Replicate()])
    first, = redistribution(tensor([Partial()]), [Shard(0)])
    second, = redistribution(tensor([Shard(0)]), [Replicate()])
    assert one.counted == first.counted + second.counted == 2 * 512


def test_two_axes_are_gathered_one_after_the_other():
    both = tensor([Shard(0), Shard(1)], {"dp_shard": 2, "tp": 2})
    moves = redistribution(both, [Replicate(), Replicate()])
    assert sorted(m.axis for m in moves) == ["dp_shard", "tp"] and {m.kind for m in moves} == {"all_gather"}
    assert moves[-1].bytes_out == 512
    assert str(redistribution(both, [Replicate(), Shard(1)])[0]) == "all-gather over dp_shard, 128 B in, 256 B out"


def test_one_placement_for_each_axis():
    with pytest.raises(WorkbenchError, match="2 placements for a mesh of 1 axes: give one for each"):
        redistribution(tensor([Shard(0)]), [Replicate(), Replicate()])
