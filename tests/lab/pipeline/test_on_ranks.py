"""Pipelines on real ranks, bitwise against eager; and ranks that would hang, told before anything is launched."""

from __future__ import annotations

import pytest

from lab.pipeline.pipelines import all_schedules, piped, refused, trained_beside_eager, with_half_of_the_gradients
from workbench.lab.pipeline.run import run_pipeline

pytestmark = pytest.mark.integration
NIGHTLY = pytest.mark.nightly
EACH_OF_4, EACH_OF_8 = ([f"layers.{i}" for i in range(1, layers)] for layers in (4, 8))
TWO = [("1F1B", ["layers.2"]), ("ZBVZeroBubble", EACH_OF_4), ("DualPipeV", EACH_OF_4), ("GPipe", ["layers.1"]),
       ("Interleaved1F1B", EACH_OF_4), ("LoopedBFS", EACH_OF_4)]
FOUR = [("1F1B", EACH_OF_8[1::2]), ("ZBVZeroBubble", EACH_OF_8), ("Interleaved1F1B", EACH_OF_8)]


@pytest.mark.compat
@pytest.mark.parametrize("schedules", [
    pytest.param(TWO[:2], id="daily"), pytest.param(TWO[2:], id="others", marks=NIGHTLY)])
def test_each_schedule_on_two_ranks_gives_the_uncut_model_s_loss_and_gradients(pool2, schedules):
    ranks = pool2.run(all_schedules, 4, schedules)
    for results in zip(*ranks, strict=True):
        assert [odd for odd, _ in results] == [[], []]
        assert sum(count for _, count in results) == 4 * 9 + 3


@NIGHTLY
def test_schedules_on_four_ranks_give_the_uncut_model_s_loss_and_gradients(pool4):
    for results in zip(*pool4.run(all_schedules, 8, FOUR), strict=True):
        assert [odd for odd, _ in results] == [[]] * 4
        assert sum(count for _, count in results) == 8 * 9 + 3


@NIGHTLY  # what is launched: test_fsdp_gathers_and_scatters_once_a_step_also_in_buckets
@pytest.mark.parametrize("recipe", [
    pytest.param(piped(["layers.1"], layers=2), id="1F1B"),
    pytest.param(piped(["layers.1", "layers.2", "layers.3"], "ZBVZeroBubble"), id="zero bubble")])
def test_two_steps_with_fsdp_inside_compute_what_whole_parameters_do(pool4, recipe):
    recipe = recipe.override({"mesh.dp_shard": 2, "passes": ["transformer_block_bucketing"]})
    assert pool4.run(trained_beside_eager, recipe) == [[]] * 4


def test_a_recipe_trains_and_says_what_it_proved(pool2):
    report = run_pipeline(piped(["layers.1"], layers=2), world=pool2)
    assert str(report.numerics) == "numerics: PASS (loss and 10 gradients are bitwise the uncut model's)"
    first, last = report.losses
    assert last < first and 0 < report.estimate.bubble < 1 and report.estimate.ideal == 1 / 5


def test_a_gradient_that_is_not_the_uncut_model_s_is_told(pool2):
    for verdict in pool2.run(with_half_of_the_gradients):
        assert verdict.startswith("numerics: FAIL (") and verdict.endswith("differ from the uncut model's)")


REFUSALS = {
    "stages": "WorkbenchError: rank 1 has other stages, or other collectives in stages [1], than rank 0: run the same "
              "cut and passes on all ranks",
    "microbatches": "WorkbenchError: this schedule would hang: on rank 0 stage 0 sends the activation of microbatch 3, "
                    "and nothing on rank 1 answers it",
    "schedule": "WorkbenchError: this schedule would hang: ranks 0 and 1 wait: stage 0 receives the gradient of "
                "microbatch 0, and stage 1 receives the activation of microbatch 2",
}


def test_ranks_that_would_hang_are_told_before_anything_is_launched(pool2):
    told, also = pool2.run(refused, list(REFUSALS))
    assert told == list(REFUSALS.values()) and len(set(map(bool, also))) == 1
