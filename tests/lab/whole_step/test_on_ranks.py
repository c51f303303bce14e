"""Recipes whose step is one graph, on real ranks: bitwise the eager loop, every verdict, and planted faults."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from on_ranks import build_with, outcomes, small, user_pass

from lab.whole_step.step_faults import (
    forgets_the_step_count,
    leaves_a_gradient_out_of_the_norm,
    leaves_out_the_other_ranks_norm,
    swaps_two_gradients,
)
from lab.whole_step.whole_steps import (
    BLOCKS,
    CAPACITY,
    DECOMPOSE,
    INDUCTOR,
    JOINED,
    differing,
    experts,
    gloo_and_nccl,
    whole,
)
from workbench.authoring.author import author
from workbench.pipeline import train as training
from workbench.pipeline.build import build
from workbench.recipe.recipe import RecipeError
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@gloo_and_nccl(2)
@pytest.mark.parametrize("recipe", [
    pytest.param(whole({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2"),
    pytest.param(whole({"tp": 2}), id="tp 2", marks=pytest.mark.nightly),
    pytest.param(experts({"dp_shard": 2, "ep": 2}, (BLOCKS,), **CAPACITY), id="experts, capacity",
                 marks=pytest.mark.nightly),
    pytest.param(experts({"dp_shard": 2, "ep": 2}), id="experts, dropless", marks=pytest.mark.nightly),
    pytest.param(whole({"dp_shard": 2}, **{"model.attention": "flex"}), id="flex", marks=pytest.mark.nightly),
])
def test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool, recipe):
    for odd, count, verdicts, schedule in pool.run(differing, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS"


@pytest.mark.nightly
@gloo_and_nccl(4)
@pytest.mark.parametrize("recipe", [
    pytest.param(whole({"dp_shard": 4}), id="dp_shard 4"),  # in a bucket, NCCL may add up four ranks in another order
    pytest.param(whole({"dp_shard": 2, "tp": 2}, (), (BLOCKS,)), id="dp_shard 2 x tp 2"),
    pytest.param(whole({"dp_replicate": 2, "dp_shard": 2}), id="dp_replicate 2 x dp_shard 2"),
    pytest.param(experts({"dp_shard": 2, "tp": 2, "ep": 2}, **CAPACITY), id="experts"),
])
def test_five_steps_on_four_ranks_are_bitwise_the_eager_loop_s(pool, recipe):
    test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool, recipe)


def at_level_full(recipe):
    built = build(recipe, current_world(), level="full")
    built.step.close()
    pipeline = [(v.check, str(v.outcome), v.message) for v in built.pipeline]
    return {r.name: outcomes(built, r.name) for r in built.records}, pipeline


@pytest.mark.nightly
@pytest.mark.parametrize("mesh, buckets", [({"dp_shard": 2}, (BLOCKS,)), ({"tp": 2}, ())], ids=["dp_shard 2", "tp 2"])
def test_one_compiled_graph_stays_within_its_contract(pool2, mesh, buckets):
    passes, pipeline = pool2.run(at_level_full, whole(mesh, (DECOMPOSE,), (*buckets, INDUCTOR)))[0]
    assert {check: outcome for check, (outcome, _) in passes[INDUCTOR].items()} == {
        "effect": "PASS", "numerics": "PASS"}
    assert [check for check, outcome, _ in pipeline if outcome == "PASS"] == ["lint", "collectives", "numerics"]


def planted(recipe, fault):
    """(verdicts of a pass that plants the fault, the pipeline's numerics, and its lint)."""

    def edit(gm):
        fault(gm)
        return gm

    built = build_with(recipe, fault.__name__, edit, stage="step")
    return outcomes(built, fault.__name__), [(v.check, str(v.outcome), v.message) for v in built.pipeline]


def does_nothing(gm):
    """No fault at all."""


@pytest.mark.parametrize("fault", [
    forgets_the_step_count, *(pytest.param(each, marks=pytest.mark.nightly) for each in (
        leaves_a_gradient_out_of_the_norm, swaps_two_gradients, does_nothing))])
def test_numerics_catches_what_a_pass_does_to_the_update(pool2, fault):
    verdicts, pipeline = pool2.run(planted, whole({"dp_shard": 2}), fault)[0]
    wanted = "PASS" if fault is does_nothing else "FAIL"
    assert verdicts["numerics"][0] == wanted
    assert [outcome for check, outcome, _ in pipeline if check == "numerics"] == [wanted]
    if fault is forgets_the_step_count:
        assert verdicts["lint"][0] == "FAIL" and "write to step" in verdicts["lint"][1]


def with_a_broken_weight(recipe, eager):
    authored = author(recipe, current_world()) if eager else None
    built = None if eager else build(recipe, current_world())
    module = authored.module if eager else built.authored.module
    with torch.no_grad():
        weight = next(module.parameters())
        weight.mul_(float("nan"))
        before = [getattr(p, "_local_tensor", p).clone() for p in module.parameters()]
    seen = training.train(authored or built.authored, built and built.step)
    same = [torch.equal(a.nan_to_num(), getattr(p, "_local_tensor", p).nan_to_num())
            for a, p in zip(before, module.parameters(), strict=True)]
    return all(same), seen.warning()


SKIPPED, APPLIED = "the update was skipped", "the update was applied all the same"


@pytest.mark.parametrize(("choice", "did", "eager"), [
    pytest.param("skip", SKIPPED, False, id="skip, whole"), pytest.param("apply", APPLIED, True, id="apply, eager"),
    pytest.param("skip", SKIPPED, True, id="skip, eager", marks=pytest.mark.nightly),
    pytest.param("apply", APPLIED, False, id="apply, whole", marks=pytest.mark.nightly)])
def test_a_norm_that_is_nan_is_told_and_done_as_the_recipe_says(pool2, choice, did, eager):
    recipe = whole({"dp_shard": 2}, **{"training.nan_norm": choice, "training.steps": 2})
    for same, told in pool2.run(with_a_broken_weight, recipe, eager):
        assert same is (choice == "skip")
        assert told == f"the gradient norm was NaN or infinite in step 0, 1: {did} (training.nan_norm)"


@pytest.mark.parametrize(("own", "make", "said"), [
    ({"stage": "step"}, lambda: small({"dp_shard": 2}, (), ("own",)),
     "runs on the whole step in one graph, and training.step is \"pair\": set it to \"whole\", or drop the pass"),
    ({"stage": "partitioned", "needs": {"pair"}}, lambda: whole({"dp_shard": 2}, (), ("own",)),
     "needs forward and backward apart, and training.step is \"whole\": set it to \"pair\", or drop the pass")])
def test_a_pass_that_the_step_has_no_graph_for_is_refused(own, make, said):
    with user_pass("own", lambda gm: gm, **own), pytest.raises(RecipeError) as told:
        make()
    assert str(told.value).endswith(f"passes[0]: pass 'own' {said}")


def test_a_norm_of_one_rank_alone_fails_the_join_s_collectives(fake4):
    joined = build(whole({"dp_shard": 4}), fake4).step.split
    assert len(joined.facts.saved_names) > 20
    assert joined.facts.saved_names <= {node.name for node in joined.graph.graph.nodes}
    assert [str(v.outcome) for v in joined.verdicts()] == ["PASS", "PASS"]
    leaves_out_the_other_ranks_norm(joined.graph)
    found = joined.verdicts()[1]
    assert (found.outcome, found.message) == ("FAIL", "no all-reduce adds up the squared norm of all ranks")
