"""What only GPUs can show of a whole step: one recording of it, and steps that nobody waits for."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from lab.whole_step.whole_steps import BLOCKS, CAPACITY, JOINED, differing, experts, whole
from workbench.pipeline import train as training
from workbench.pipeline.build import build
from workbench.world.mesh import current_world
from workbench.world.ranks import ranks


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "recipe"), [
    pytest.param(1, whole({}), id="one rank"),
    pytest.param(2, whole({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2", marks=pytest.mark.multi_gpu(2)),
    pytest.param(2, experts({"dp_shard": 2, "ep": 2}, **CAPACITY), id="experts", marks=pytest.mark.multi_gpu(2)),
    pytest.param(4, whole({"dp_shard": 4}), id="dp_shard 4", marks=pytest.mark.multi_gpu(4)),
])
def test_one_recording_of_the_whole_step_is_bitwise_the_eager_loop_s(n, recipe):
    recorded = recipe.override({"passes": [*recipe.pass_names, "cudagraph"]})
    with ranks(n, backend="nccl", timeout=120, echo="none") as pool:
        for odd, compared, verdicts, schedule in pool.run(differing, recorded):
            assert odd == [] and compared >= 12 * 4 and verdicts == JOINED
            assert schedule == ("PASS" if n > 1 else "UNKNOWN")  # one rank has none to be compared with


def trained_unread(recipe):
    """Train with one read at the end; from the second step on, what waits for the device raises."""
    built, made, read = build(recipe, current_world()), training.Batches.at, training._read

    def at(self, step):
        if step:
            torch.cuda.set_sync_debug_mode("error")
        return made(self, step)

    def reading(*given):
        torch.cuda.set_sync_debug_mode("default")
        return read(*given)

    with patch.object(training.Batches, "at", at), patch.object(training, "_read", reading):
        found = training.train(built.authored, built.step)
    built.step.close()
    return len(found.losses)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [whole({}, (), ("cudagraph",)), experts({}, (), **CAPACITY)],
                         ids=["whole step", "experts"])
def test_no_step_waits_for_the_device_before_its_loss_is_read(recipe):
    steps = {"training.steps": 5, "training.read_loss_every": 5}
    with ranks(1, backend="nccl", timeout=120, echo="none") as pool:
        assert pool.run(trained_unread, recipe.override(steps)) == [5]
