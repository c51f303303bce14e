"""What a change of placements sends, and what a rank holds."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from workbench import author, fake_world, load_recipe, simulated_world
from workbench.world.simulated import shards
from workbench_lessons.l01_author_with_dtensor.pictures import parameter_table, redistribute


def test_the_table_adds_up_what_a_rank_holds() -> None:
    recipe = load_recipe("llama3").override({"model.n_layers": 1, "mesh.dp_shard": 2, "mesh.tp": 2})
    with simulated_world(4) as world:
        authored = author(recipe, world)
        held = [shards(p)[3] for p in authored.module.parameters()]
    found = parameter_table(authored, rank=3)
    assert [row[-1] for row in found.rows] == [t.nbytes for t in held]
    assert found.notes == (f"12 parameters, {sum(t.nbytes for t in held):,} bytes on rank 3",)
    assert len(parameter_table(authored, "layers.0.attention.").rows) == 4


def test_a_redistribution_shows_what_is_sent() -> None:
    with fake_world(4) as world:
        mesh = world.mesh_of({"dp_shard": 2, "tp": 2})
        tensor = DTensor.from_local(torch.empty(4, 4), mesh, [Shard(0), Shard(1)], run_check=False)
    lines = redistribute(tensor, [Replicate(), Shard(1)], "w").text.splitlines()
    assert lines[:4] == ["w [8, 8]", "before: dp_shard cuts dim 0, tp cuts dim 1",
                         "all-gather over dp_shard, 64 B in, 128 B out", "after: dp_shard replicates it, tp cuts dim 1"]
    assert lines[4:] == ["ranks 0, 2: dim 0 [0:8], dim 1 [0:4]", "ranks 1, 3: dim 0 [0:8], dim 1 [4:8]"]
    assert "no collective" in redistribute(tensor, [Shard(0), Shard(1)]).text
    with fake_world(4):
        loss = DTensor.from_local(torch.tensor(1.0), init_device_mesh("cpu", (2, 2)), [Replicate(), Partial()],
                                  run_check=False)
    assert "all-reduce over 1, 4 B in, 4 B out" in redistribute(loss, [Replicate(), Replicate()]).text
