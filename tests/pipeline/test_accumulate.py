"""Gradient accumulation inside the whole-step graph, on real ranks: bitwise the eager loop that adds up gradients."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
import whole_steps
from on_ranks import build_with, outcomes
from step_faults import (
    ACCUMULATION,
    adds_up_without_the_mean,
    reads_the_first_microbatch_again,
    reduces_each_microbatch,
)
from torch import nn
from whole_steps import BLOCKS, CAPACITY, DECOMPOSE, INDUCTOR, JOINED, differing, experts, whole

from workbench import author_module, capture, partition
from workbench.authoring.author import author
from workbench.authoring.microbatches import accumulate, cut
from workbench.authoring.plans import ParallelPlan
from workbench.checks import joining
from workbench.errors import WorkbenchError
from workbench.graph.read.collectives import list_collectives
from workbench.graph.step_graph import join
from workbench.graph.update import Update
from workbench.graph.whole_step import WholeStep
from workbench.pipeline.build import build
from workbench.pipeline.run_passes import run_joint
from workbench.pipeline.train import apart, clip, optimizer_of
from workbench.recipe.recipe import RecipeError
from workbench.recipe.sections import MeshSpec, PassSpec, TrainingSpec
from workbench.torch_api import aot
from workbench.world.mesh import current_world

pytestmark = pytest.mark.integration
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ALWAYS, NEVER = ({"name": "reshard_after_forward", "policy": policy} for policy in ("always", "never"))
HALF = {"precision.param": "bfloat16"}


def accumulating(mesh, joint=(), passes=(), count=2, **changes):
    sizes = {"training.accumulate": count, "data.batch_per_rank": 2 * count}
    return whole(mesh, joint, passes, **{**sizes, **changes})


def routed(mesh, **changes):
    return experts(mesh, **{**CAPACITY, "training.accumulate": 2, "data.batch_per_rank": 4, **changes})


@pytest.mark.parametrize("recipe", [
    pytest.param(accumulating({"dp_shard": 2}, (), (BLOCKS,)), id="dp_shard 2, buckets", marks=pytest.mark.nightly),
    pytest.param(accumulating({"dp_shard": 2}, (ALWAYS,), count=3), id="dp_shard 2, gathered again",
                 marks=pytest.mark.nightly),
    pytest.param(accumulating({"dp_shard": 2}, (NEVER,), **HALF), id="bfloat16, gathered once"),
    pytest.param(accumulating({"dp_replicate": 2}), id="dp_replicate 2", marks=pytest.mark.nightly),
    pytest.param(accumulating({"tp": 2}), id="tp 2", marks=pytest.mark.nightly),
])
def test_five_steps_on_two_ranks_are_bitwise_the_eager_loop_s(pool2, recipe):
    for odd, count, verdicts, schedule in pool2.run(differing, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS"


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [
    pytest.param(accumulating({"dp_shard": 4}, (), (BLOCKS,)), id="dp_shard 4"),
    pytest.param(accumulating({"dp_shard": 2, "tp": 2}, (), (BLOCKS,)), id="dp_shard 2 x tp 2"),
    pytest.param(accumulating({"dp_replicate": 2, "dp_shard": 2}), id="dp_replicate 2 x dp_shard 2"),
    pytest.param(routed({"dp_shard": 2, "tp": 2, "ep": 2}), id="experts"),
])
def test_five_steps_on_four_ranks_are_bitwise_the_eager_loop_s(pool4, recipe):
    for odd, count, verdicts, schedule in pool4.run(differing, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS"


def planted(recipe, fault):
    """(verdicts of a pass that plants the fault, what the pipeline's numerics say, and the join's checks after it)."""
    kept = []

    def edit(gm):
        fault(gm)
        kept.append(gm)
        return gm

    built = build_with(recipe, fault.__name__, edit, stage="step")
    numerics = [str(v.outcome) for v in built.pipeline if v.check == "numerics"]
    return outcomes(built, fault.__name__), numerics, [(v.check, str(v.outcome), v.message)
                                                       for v in joining.of_joined(built.step.joined)]


def does_nothing(gm):
    """No fault at all."""


QUICK = (reads_the_first_microbatch_again, reduces_each_microbatch)  # lint and numerics, and collectives


@pytest.mark.parametrize("fault", [
    pytest.param(each, marks=() if each in QUICK else pytest.mark.nightly) for each in (*ACCUMULATION, does_nothing)])
def test_each_fault_of_the_sums_is_caught(pool2, fault):
    verdicts, pipeline, joined = pool2.run(planted, accumulating({"dp_shard": 2}), fault)[0]
    if fault is reduces_each_microbatch:  # the values are the same, up to the order of additions
        assert verdicts["collectives"][0] == "FAIL"
        assert joined[1][1] == "FAIL" and "reduce_scatter dp_shard avg" in joined[1][2]
        return
    wanted = "PASS" if fault is does_nothing else "FAIL"
    assert verdicts["numerics"][0] == wanted and pipeline == [wanted]
    lint = "PASS" if fault is adds_up_without_the_mean else wanted  # a number, which only a run can judge
    assert joined[0][:2] == ("lint", lint)
    if lint == "FAIL":
        said = "reads the rows of microbatch 0" if fault is reads_the_first_microbatch_again else "each must count once"
        assert said in joined[0][2]


@pytest.fixture(scope="module")
def gathers_and_reductions(fake4):
    """Those of one and of two microbatches, by a pass before the partition."""
    captured = capture(author(accumulating({"dp_shard": 4}), fake4))

    def counts(spec):
        joint = captured.fork()
        run_joint(joint, [spec])
        pair = partition(joint)
        for microbatches in (1, 2):
            found = list_collectives(join(pair, Update(), microbatches=microbatches).graph)
            yield [sum(c.kind == kind for c in found) for kind in ("all_gather", "reduce_scatter")]

    return counts


def test_weights_that_are_kept_are_gathered_once_and_gradients_are_reduced_once(gathers_and_reductions):
    one, two = gathers_and_reductions(PassSpec(**NEVER))
    assert one == [12, 12] and two == [13, 12]  # no backward reads the embedding, so that it is not kept


def test_weights_that_are_freed_are_gathered_by_each_microbatch(gathers_and_reductions):
    one, two = gathers_and_reductions(PassSpec(**ALWAYS))
    assert two[0] == 2 * one[0] > 24 and one[1] == two[1] == 12


def test_the_join_states_the_memory_of_the_sums(fake4):
    built = build(accumulating({"dp_shard": 4}), fake4)
    lint = built.pipeline[0]
    held = 4 * sum(p.numel() for p in built.authored.module.parameters())
    assert lint.evidence["accumulated_bytes"] == held and lint.evidence["microbatches"] == 2
    assert lint.message == ("12 parameters, each updated once, from its own gradient; the sums of 2 microbatches' "
                            f"unsharded gradients hold {held:,} bytes a rank")
    one = build(accumulating({"dp_shard": 4}, count=1, **{"data.batch_per_rank": 4}), fake4)
    assert built.flop == one.flop and built.saved_bytes < one.saved_bytes
    assert "accumulated_bytes" not in one.pipeline[0].evidence


class Twice(nn.Module):
    """One layer that each forward reads twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        return ((self.layer(torch.relu(self.layer(x))) - y) ** 2).mean()


def with_load(recipe):
    """What `differing` says, and the copies of tokens that the first step of the whole graph routed on all ranks."""
    seen, made = [], whole_steps.training.train
    whole_steps.training.train = lambda *given: seen.append(made(*given)) or seen[-1]
    try:
        return *differing(recipe), seen[0].load.copies(0)
    finally:
        whole_steps.training.train = made


def test_five_steps_of_experts_are_bitwise_and_their_load_is_that_of_all_microbatches(pool2):
    recipe = routed({"dp_shard": 2, "ep": 2})
    sizes = recipe.model.sizes()
    layers = sizes["n_layers"] - sizes["n_dense_layers"]
    wanted = layers * sizes["top_k"] * 2 * recipe.data.batch_per_rank * recipe.data.seq_len
    for odd, count, verdicts, schedule, load in pool2.run(with_load, recipe):
        assert odd == [] and count >= 12 * 4 and verdicts == JOINED and schedule == "PASS" and load == wanted


def read_twice(_):
    """Whether three steps of two microbatches are bitwise the eager loop's, and the parameter's reductions."""
    world = current_world()

    def batch():
        generator = torch.Generator().manual_seed(world.rank)
        return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)

    def made():
        torch.manual_seed(0)
        authored = author_module(Twice(), world, world.mesh(MeshSpec(dp_shard=2)), ParallelPlan(), batch=batch)
        lr = torch.tensor(1e-2, dtype=torch.float64)
        return authored, torch.optim.AdamW(authored.module.parameters(), lr=lr, fused=True)

    authored, optimizer = made()
    joined = join(partition(capture(authored)), Update(), microbatches=2)
    checked = [str(v.outcome) for v in joining.of_joined(joined)]
    joined.body = aot.boxed(joined.graph)
    step = WholeStep(joined, optimizer)
    eager, theirs = made()
    same = []
    generator = torch.Generator().manual_seed(7 + world.rank)
    for _ in range(3):
        rows = torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)
        loss, norm = step(*rows)
        wanted = accumulate(eager.module, rows, 2)
        limit = clip(eager, 1.0)
        theirs.step(), theirs.zero_grad()
        same += [torch.equal(loss, wanted), torch.equal(norm, limit)]
    same += [torch.equal(p.to_local(), q.to_local())
             for p, q in zip(authored.module.parameters(), eager.module.parameters(), strict=True)]
    return same, checked, sum(c.kind == "reduce_scatter" for c in list_collectives(joined.graph))


def test_a_parameter_that_a_forward_reads_twice_is_reduced_once_for_each_read(pool2):
    for same, checked, reductions in pool2.run(read_twice, None):
        assert len(same) == 8 and all(same) and checked == ["PASS", "PASS"] and reductions == 4


def at_level_full(recipe):
    built = build(recipe, current_world(), level="full")
    return {r.name: outcomes(built, r.name) for r in built.records}, [(v.check, str(v.outcome)) for v in built.pipeline]


@pytest.mark.nightly
def test_inductor_compiles_two_microbatches_within_its_contract(pool2):
    recipe = accumulating({"dp_shard": 2}, (DECOMPOSE,), (BLOCKS, INDUCTOR))
    for passes, pipeline in pool2.run(at_level_full, recipe):
        assert {check: outcome for check, (outcome, _) in passes[INDUCTOR].items()} == {
            "effect": "PASS", "numerics": "PASS"}
        assert pipeline == [*JOINED, ("numerics", "PASS")]


STEP = ('training.accumulate: 2 microbatches are added up inside the graph of a whole step, and training.step is '
        '"pair": set it to "whole", or accumulate to 1')


@pytest.mark.parametrize(("changes", "message"), [
    ({"data.batch_per_rank": 3}, "training.accumulate: data.batch_per_rank 3 does not divide by training.accumulate 2: "
                                 "change one of them"),
    ({"training.step": "pair"}, STEP),
    ({"training.accumulate": 0}, "training.accumulate: Input should be greater than 0, got 0"),
    ({"training.accumulate": -2}, "training.accumulate: Input should be greater than 0, got -2"),
    ({"training.accumulate": 1.5}, "training.accumulate: Input should be a valid integer, got 1.5"),
    ({"training.accumulate": "two"}, "training.accumulate: Input should be a valid integer, got text 'two'"),
    ({"training.accumulate": True}, "training.accumulate: Input should be a valid integer, got true"),
])
def test_a_recipe_names_the_wrong_number_of_microbatches(changes, message):
    with pytest.raises(RecipeError) as told:
        accumulating({"dp_shard": 2}, **changes)
    assert str(told.value).endswith(message)


def test_dropless_experts_are_refused_by_name():
    with pytest.raises(RecipeError) as told:
        routed({"dp_shard": 2, "ep": 2}, **{"model.dispatch": "dropless"})
    assert str(told.value).endswith(
        "training.accumulate: several microbatches in one graph need sizes that are the same in all, and dropless "
        'dispatch reads them from the device: set model.dispatch to "capacity", or accumulate to 1')


def test_one_microbatch_is_the_default():
    assert TrainingSpec().accumulate == 1


def test_a_step_that_reduces_each_microbatch_is_refused_by_the_loop(fake4):
    authored = author(accumulating({"dp_shard": 4}), fake4)
    with pytest.raises(WorkbenchError) as told:
        apart(authored, lambda *batch: None, optimizer_of(authored))
    assert str(told.value) == ("the recipe accumulates 2 microbatches, and this step reduces each one's gradients: "
                               "train the module or a WholeStep, or set training.accumulate to 1")


@pytest.mark.parametrize(("batch", "what"), [
    ((torch.zeros(4), torch.zeros(3, 2)), "input 1 of the step is [3, 2]"),
    ((torch.zeros(()),), "input 0 of the step is []"),
    ((4,), "input 0 of the step is int"),
])
def test_a_batch_that_cannot_be_cut_is_refused(batch, what):
    with pytest.raises(WorkbenchError) as told:
        cut(batch, 2)
    assert str(told.value) == (f"{what}, and 2 microbatches need a tensor whose first dim divides by 2: give such a "
                               "batch, or accumulate over fewer")
