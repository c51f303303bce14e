"""Which part of a parameter a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from workbench.authoring.layout import Layout, part_bounds


@pytest.mark.parametrize(("size", "parts"), [(8, 4), (257, 4), (5, 4), (3, 4), (1, 4)])
def test_parts_are_those_of_torch_chunk(size, parts):
    whole = torch.arange(size)
    chunks = [chunk.tolist() for chunk in whole.chunk(parts)]
    chunks += [[]] * (parts - len(chunks))
    assert [whole.narrow(0, *part_bounds(size, parts, index)).tolist() for index in range(parts)] == chunks


@pytest.mark.parametrize("cut_dim", [None, 0, 1])
def test_every_element_is_held_by_exactly_one_rank_of_shard_and_tp(cut_dim):
    whole = torch.arange(7 * 6).view(7, 6)
    layout = Layout("w", whole.shape, cut_dim, True, {"dp_shard": 3, "tp": 2})
    held = []
    for shard in range(3):
        for tp in range(2):
            place = {"dp_shard": shard, "tp": tp}
            part = layout.local_part(whole, place)
            assert part.shape == layout.local_shape(place)
            held += part.flatten().tolist() if cut_dim is not None or tp == 0 else []
    assert sorted(held) == list(range(42))


def test_placements_say_that_tensor_parallelism_cuts_first():
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert Layout("w", torch.Size((8, 8)), 1, True, sizes).placements() == (Replicate(), Shard(0), Shard(1))
    first: Any = Layout("w", torch.Size((8, 8)), 0, True, sizes).placements()
    assert first[2] == Shard(0)
    assert first[1] != Shard(0)
    assert first[1].split_factor == 2
