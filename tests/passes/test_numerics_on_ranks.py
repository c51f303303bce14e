"""Passes train as eager does, on four ranks: five steps, the loss and every gradient of each; tests/test_compat.py has
all of them.
"""

from __future__ import annotations

import pytest
from on_ranks import FSDP4, FSDP_TP, small, trajectory

pytestmark = pytest.mark.ranks
AC, RESHARD, BLOCKS = "activation_checkpointing", "reshard_after_forward", "transformer_block_bucketing"


# bitwise on gloo, over a group of four, too; the bucketing contracts still say REDUCTION_ORDER, since another backend
# may cut a longer message differently
@pytest.mark.parametrize(("mesh", "joint_passes", "passes"), [
    (FSDP4, (), ("autobucketing_reordering",)),
    (FSDP_TP, (AC, RESHARD), (BLOCKS, "overlap_collectives", "graph_cleanup")),
], ids=str)
def test_bitwise(pool4, mesh, joint_passes, passes):
    for found in pool4.run(trajectory, small(mesh, joint_passes, passes)):
        assert found["differing"] == []
        assert found["tensors"] == 13 and len(set(found["losses"])) == 5
        assert found["outcomes"] == dict.fromkeys(found["outcomes"], "PASS") and found["schedule"] == "PASS"
