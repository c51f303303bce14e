"""Gradient accumulation inside the whole-step graph, on real ranks: bitwise the eager loop that adds up gradients."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
from on_ranks import small
from whole_steps import BLOCKS, JOINED, differing

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def accumulating(mesh, joint=(), passes=(), count=2, **changes):
    return small(mesh).override({"training.step": "whole", "training.accumulate": count, "data.batch_per_rank": 4,
                                 "joint_passes": list(joint), "passes": list(passes), **changes})


@pytest.mark.parametrize("recipe", [
    pytest.param(accumulating({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2"),
])
def test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool2, recipe):
    for odd, count, verdicts, schedule in pool2.run(differing, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS"
