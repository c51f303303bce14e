"""Experts spread over 4 real ranks, against the whole model on one."""

import pytest

from .test_author_on_ranks import FSDP, FSDP_TP, HSDP, distances, recipe

pytestmark = pytest.mark.ranks
SMALL = {"family": "deepseek_v3", "n_layers": 2, "dim": 32, "ffn_dim": 48, "expert_dim": 16, "kv_lora_rank": 16,
         "qk_nope_dim": 8, "qk_rope_dim": 4, "v_dim": 8}
BOTH = "dp_shard x tp"


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        (FSDP_TP | {"ep": 2, "ep_over": BOTH}, {"q_lora_rank": 12}),
        (FSDP | {"ep": 2}, {"n_experts": 2, "n_groups": 1, "top_groups": 1}),  # one expert a rank: FSDP cuts inside it
        (HSDP | {"ep": 2}, {"score": "softmax", "normalise": False, "dispatch": "capacity", "capacity_factor": 8.0}),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_whole_model(pool4, mesh, model):
    for found in pool4.run(distances, recipe(mesh, SMALL | model, "float64")):
        assert len([name for name in found if "experts.w" in name and "shared" not in name]) == 3
        assert max(found.values()) < 1e-10, max(found.items(), key=lambda item: item[1])


def test_experts_gradients_that_are_not_divided_would_be_noticed(pool4):
    found = pool4.run(distances, recipe(FSDP_TP | {"ep": 2}, SMALL, "float64"), "experts not divided")[0]
    wrong = {name for name, distance in found.items() if distance > 1e-10}
    assert wrong == {name for name in found if ".moe.experts." in name}
