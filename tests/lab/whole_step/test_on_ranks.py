"""Recipes whose step is one graph, on real ranks: bitwise the eager loop, every verdict, and planted faults."""

from unittest.mock import patch

import pytest
import torch
from on_ranks import FSDP4, build_with, calls, full_level, of_the_list, outcomes, small, user_pass

from lab.whole_step.whole_steps import (
    BLOCKS,
    CAPACITY,
    JOINED,
    differing,
    experts,
    forgets_the_step_count,
    gloo_and_nccl,
    leaves_out_the_other_ranks_norm,
    whole,
)
from workbench import author, build, current_world, ranks, what_if
from workbench.lab.traced_capture.cut import AGAIN
from workbench.pipeline import train as training
from workbench.recipe.recipe import RecipeError

pytestmark = pytest.mark.integration


@gloo_and_nccl(2)
@pytest.mark.parametrize("recipe", [
    pytest.param(whole({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2"),
    pytest.param(whole({"tp": 2}), id="tp 2", marks=pytest.mark.nightly),
    pytest.param(experts({"dp_shard": 2, "ep": 2}), id="experts, dropless", marks=pytest.mark.nightly),
    pytest.param(whole({"dp_shard": 2}, **{"model.attention": "flex"}), id="flex", marks=pytest.mark.nightly),
])
def test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool, recipe):
    for odd, count, verdicts, schedule in pool.run(differing, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS"


@pytest.mark.nightly
@gloo_and_nccl(4)
@pytest.mark.parametrize("recipe", [
    pytest.param(whole({"dp_shard": 2, "tp": 2}, (), (BLOCKS,)), id="dp_shard 2 x tp 2"),
    pytest.param(whole({"dp_replicate": 2, "dp_shard": 2}), id="dp_replicate 2 x dp_shard 2"),
    pytest.param(experts({"dp_shard": 2, "tp": 2, "ep": 2}, **CAPACITY), id="experts"),
])
def test_five_steps_on_four_ranks_are_bitwise_the_eager_loop_s(pool, recipe):
    test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool, recipe)


@pytest.mark.nightly
def test_one_compiled_graph_stays_within_its_contract(pool2):
    compiled = "full_inductor_compilation"
    passes, pipeline = pool2.run(full_level, whole({"dp_shard": 2}, ("inductor_decomposition",), (BLOCKS, compiled)))[0]
    assert {check: found[0] for check, found in passes[compiled].items()} == {"effect": "PASS", "numerics": "PASS"}
    assert pipeline == ["PASS"] * 3  # lint, collectives, numerics


def planted(recipe, fault):
    """(verdicts of a pass that plants the fault, and those of the pipeline)."""
    built = build_with(recipe, fault.__name__, lambda gm: fault(gm) or gm, stage="step")
    return outcomes(built, fault.__name__), of_the_list(built)


def test_numerics_catches_what_a_pass_does_to_the_update(pool2):
    verdicts, pipeline = pool2.run(planted, whole({"dp_shard": 2}), forgets_the_step_count)[0]
    assert verdicts["numerics"][0] == "FAIL"
    assert [outcome for check, outcome in pipeline if check == "numerics"] == ["FAIL"]
    assert verdicts["lint"][0] == "FAIL" and "write to step" in verdicts["lint"][1]


def with_a_broken_weight(recipe, eager):
    built = None if eager else build(recipe, current_world())
    authored = author(recipe, current_world()) if eager else built.authored
    shards = [getattr(p, "_local_tensor", p) for p in authored.module.parameters()]
    with torch.no_grad():
        shards[0].mul_(float("nan"))
        before = [shard.clone() for shard in shards]
    seen = training.train(authored, built and built.step)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, shards, strict=True)), seen.warning()


SKIPPED, APPLIED = "the update was skipped", "the update was applied all the same"


@pytest.mark.parametrize(("choice", "did", "eager"), [("skip", SKIPPED, False), ("apply", APPLIED, True)])
def test_a_norm_that_is_nan_is_told_and_done_as_the_recipe_says(pool2, choice, did, eager):
    recipe = whole({"dp_shard": 2}, **{"training.nan_norm": choice, "training.steps": 2})
    for same, told in pool2.run(with_a_broken_weight, recipe, eager):
        assert same is (choice == "skip")
        assert told == f"the gradient norm was NaN or infinite in step 0, 1: {did} (training.nan_norm)"


def test_a_pass_that_the_step_has_no_graph_for_is_refused():
    for own, make, said in [({"stage": "step"}, small, "runs on the whole step in one graph, and training.step is "
                                                       '"pair": set it to "whole", or drop the pass'),
                            ({"needs": {"pair"}}, whole, "needs forward and backward apart, and training.step is "
                                                         '"whole": set it to "pair", or drop the pass')]:
        with user_pass("own", lambda gm: gm, **({"stage": "partitioned"} | own)), pytest.raises(RecipeError) as told:
            make({"dp_shard": 2}, (), ("own",))
        assert str(told.value).endswith(f"passes[0]: pass 'own' {said}")


def test_a_norm_of_one_rank_alone_fails_the_join_s_collectives(fake4):
    joined = build(whole({"dp_shard": 4}), fake4).step.split
    assert len(joined.facts.saved_names) > 20
    assert joined.facts.saved_names <= {node.name for node in joined.graph.graph.nodes}
    assert [str(v.outcome) for v in joined.verdicts()] == ["PASS", "PASS"]
    leaves_out_the_other_ranks_norm(joined.graph)
    found = joined.verdicts()[1]
    assert (found.outcome, found.message) == ("FAIL", "no all-reduce adds up the squared norm of all ranks")


def test_a_study_changes_the_step_and_captures_again_only_where_it_must(fake4):
    study = what_if(small(FSDP4, (), (BLOCKS,)), fake4)
    joined = study.change({"training.step": "whole", "passes": [BLOCKS, "fused_clip_adamw"]})
    ran = list(joined.ran)
    assert "author" not in ran and ran[-2:] == ["join", "fused_clip_adamw"]
    again = study.change({"training.clip": None})
    assert list(again.ran) == ["join", "fused_clip_adamw"]
    assert study.records[-1].verdict("effect").outcome == "NO_EFFECT"
    study.revert()
    assert study.records[-1].verdict("effect").outcome == "PASS"


def merges(gm):
    """What a common-subexpression elimination would do to the first repeated product."""
    node = next(n for n in calls(gm, "aten.mm") if AGAIN in n.meta)
    first = next(n for n in calls(gm, "aten.mm") if n.name == node.meta[AGAIN])
    node.replace_all_uses_with(first)
    gm.graph.erase_node(node)
    return gm


def test_the_join_keeps_what_a_traced_backward_repeats_and_a_pass_that_merges_one_is_named(fake4):
    full = {"name": "activation_checkpointing", "policy": "full"}
    with user_pass("own", merges, stage="step"):
        built = build(whole({"dp_shard": 4}, (full,), ("own",), capture="traced"), fake4)
    assert built.pipeline[0].outcome == "FAIL"
    assert "pass 'own' dropped 1 product or attention that the backward repeats" in built.pipeline[0].message


# What only GPUs can show of a whole step: one recording of it, and steps that nobody waits for.

@pytest.mark.gpu
@pytest.mark.parametrize(("n", "recipe"), [
    pytest.param(2, whole({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2", marks=pytest.mark.multi_gpu(2)),
    pytest.param(2, experts({"dp_shard": 2, "ep": 2}, **CAPACITY), id="experts", marks=pytest.mark.multi_gpu(2)),
    pytest.param(4, whole({"dp_shard": 4}), id="dp_shard 4", marks=pytest.mark.multi_gpu(4)),
])
def test_one_recording_of_the_whole_step_is_bitwise_the_eager_loop_s(n, recipe):
    recorded = recipe.override({"passes": [*recipe.pass_names, "cudagraph"]})
    with ranks(n, backend="nccl", timeout=120, echo="none") as pool:
        for odd, compared, verdicts, schedule in pool.run(differing, recorded):
            assert odd == [] and compared >= 12 * 4 and verdicts == JOINED and schedule == "PASS"


def trained_unread(recipe):
    """Train with one read at the end; from the second step on, what waits for the device raises."""
    built, made, read = build(recipe, current_world()), training.Batches.at, training._mean_losses

    def at(self, step):
        if step:
            torch.cuda.set_sync_debug_mode("error")
        return made(self, step)

    def reading(*given):
        torch.cuda.set_sync_debug_mode("default")
        return read(*given)

    with patch.object(training.Batches, "at", at), patch.object(training, "_mean_losses", reading):
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
