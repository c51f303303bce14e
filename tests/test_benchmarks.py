"""What the benchmarks refuse to take for a measured run, and that the peers do the same work."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from workbench.authoring.author import author
from workbench.pipeline.train import total_norm
from workbench.recipe.recipe import Recipe
from workbench.world.mesh import current_world

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers import fsdp2
from benchmarks.step_time import finite

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_run_whose_loss_is_no_number_measures_nothing():
    assert finite([1.5, 0.25]) == ["0x1.8000000000000p+0", "0x1.0000000000000p-2"]
    with pytest.raises(ValueError, match="step 1: the loss is nan"):
        finite([1.5, math.nan, math.inf])


EXPERTS = {"n_experts": 4, "n_groups": 1, "top_groups": 1, "dim": 32, "ffn_dim": 48, "expert_dim": 16, "n_layers": 2}


def eager_distances(described: Recipe) -> dict[str, float]:
    """Norm-relative distance of torch's own FSDP2 to ours: the loss, every gradient and their total norm."""
    world = current_world()
    ours = author(described, world)
    batch = ours.example_batch()
    peer = fsdp2(described, world)
    losses = []
    for module in (ours.module, peer):
        losses.append(module(*batch))
        losses[-1].backward()
    expected = {name: parameter.grad.full_tensor() for name, parameter in ours.module.named_parameters()}
    found = {"loss": abs(losses[1] / losses[0] - 1).item()}
    norms = [total_norm([p.grad for p in module.parameters()]) for module in (ours.module, peer)]
    found["norm"] = abs(norms[1] / norms[0] - 1).item()
    for name, parameter in peer.named_parameters():
        gradient = parameter.grad.full_tensor()
        found[name] = ((gradient - expected[name]).norm() / expected[name].norm()).item()
    assert len(found) == len(expected) + 2
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("mesh, model", [
    ({"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    ({"dp_shard": 2, "tp": 2, "ep": 4, "ep_over": "dp_shard x tp"}, {}),
    ({"dp_shard": 2, "tp": 2, "ep": 2, "ep_over": "dp_shard x tp"}, {"dispatch": "capacity"}),
    ({"dp_shard": 4, "ep": 2}, {}),
    ({"dp_shard": 2, "tp": 2}, {"n_experts": 6}),
    ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}),
], ids=str)
def test_fsdp2_with_experts_trains_what_ours_trains(pool4, mesh, model):
    given: dict[str, Any] = dict(
        name="test", mesh=mesh, model={"family": "deepseek_v3", **EXPERTS, **model}, data={"seq_len": 16},
        # FSDP2 divides what a group of one has reduced in float64 twice
        precision={"param": "float64", "reduce": "float32"},
    )
    for found in pool4.run(eager_distances, Recipe(**given)):
        assert max(found.values()) < 1e-6, found
