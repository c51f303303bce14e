"""Which part of a parameter a rank holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from workbench import author, capture, compare_schedules, fake_world, load_recipe
from workbench.authoring.layout import Layout, part_bounds
from workbench.authoring.plans import AuthoringError
from workbench.graph.model_contract import refuse_padding


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


def test_an_axis_that_leaves_too_many_pieces_to_pad_is_refused_and_others_are_not():
    recipe = load_recipe("llama3_fsdp").override({"mesh.dp_shard": 100_000, "model.n_layers": 1})
    refusal = r"dp_shard of 100,000 ranks does not divide the rows of 12 parameters .* a capture takes 20,000 at most"
    with pytest.raises(AuthoringError, match=refusal):
        compare_schedules(recipe)
    with fake_world(100_000) as world, pytest.raises(AuthoringError, match="torch pads the pieces one by one"):
        capture(author(recipe, world))
    with fake_world(300) as world:  # 256 rows are not divided by 300, and few pieces are left
        refuse_padding(author(recipe.override({"mesh.dp_shard": 300}), world).module)
    with fake_world(100_000) as world:
        whole = recipe.override({"mesh.dp_shard": 1, "mesh.dp_replicate": 100_000})
        refuse_padding(author(whole, world).module)
