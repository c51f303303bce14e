"""What a picture of placements says is what each rank holds."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from workbench import author, load_recipe, simulated_world
from workbench.notebook import draw
from workbench.world.simulated import shards

MESHES = [{"mesh.dp_shard": 4, "mesh.tp": 1, "model.ffn_dim": 386},
          {"mesh.dp_replicate": 2, "mesh.dp_shard": 2, "mesh.tp": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_slices_are_the_shards(mesh: dict) -> None:
    recipe = load_recipe("llama3").override({"model.n_layers": 1, **mesh})
    with simulated_world(1) as alone:
        model = author(recipe.override({"mesh.dp_replicate": 1, "mesh.dp_shard": 1, "mesh.tp": 1}), alone).module
        whole = {name: shards(p)[0] for name, p in model.named_parameters()}
    with simulated_world(recipe.mesh.world_size) as world:
        checked = 0
        for name, param in author(recipe, world).module.named_parameters():
            for rank, bounds in draw.slices(param).items() if isinstance(param, DTensor) else ():
                where = tuple(slice(start, start + length) for start, length in bounds)
                assert torch.equal(shards(param)[rank], whole[name][where]), (name, rank)
                checked += 1
    assert checked >= 12 * recipe.mesh.world_size - recipe.mesh.world_size


def test_a_rank_that_holds_nothing_is_named() -> None:
    with simulated_world(4) as world:
        recipe = load_recipe("llama3").override({"model.n_layers": 1, "mesh.dp_shard": 4, "mesh.tp": 1,
                                                 "model.vocab_size": 257, "model.ffn_dim": 9})
        w1 = dict(author(recipe, world).module.named_parameters())["layers.0.feed_forward.w1.weight"]
    assert draw.placements(w1, "w1").text.splitlines()[-1] == "rank 3: dim 0 nothing, dim 1 [0:128]"


def test_a_tensor_that_is_whole_has_no_placements() -> None:
    with pytest.raises(ValueError, match="w is a Tensor, whole on every rank: there is nothing to place"):
        draw.placements(torch.ones(2), "w")
