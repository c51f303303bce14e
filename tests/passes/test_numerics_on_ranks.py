"""Passes train as eager does on four ranks: the loss and every gradient of two steps. More: tests/test_compat.py."""

import pytest
from on_ranks import FSDP_TP, small, trajectory


@pytest.mark.ranks
def test_bitwise(pool4):
    """On gloo; the contracts of bucketing say REDUCTION_ORDER: another backend may cut a longer message elsewhere."""
    recipe = small(FSDP_TP, ("activation_checkpointing", "reshard_after_forward"),
                   ("transformer_block_bucketing", "overlap_collectives", "graph_cleanup"))
    recipe = recipe.override({"training.steps": 2})
    for found in pool4.run(trajectory, recipe):
        assert found["differing"] == []
        assert found["tensors"] == 13 and len(set(found["losses"])) == 2
        assert found["outcomes"] == dict.fromkeys(found["outcomes"], "PASS") and found["schedule"] == "PASS"
