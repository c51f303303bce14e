"""memory_budget: torch's cut fits the budget, the partition keeps the plan, and each fault is seen."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from blocks import Summed
from on_ranks import FSDP4, FSDP_TP, small, trajectory
from torch import nn
from unknown_draws import NOISE, noise

from workbench import Outcome, PassSpec, WorkbenchError, author, author_module, capture, facts_of, partition
from workbench.graph.read.nodes import is_compute, unknown_operator
from workbench.lab.memory_budget import plan as plans
from workbench.lab.memory_budget.plan_table import memory_plan
from workbench.passes import registry
from workbench.passes.activation_checkpointing import checkpoint_rule
from workbench.pipeline.run_passes import JOINT, choose, run_joint, saved_bytes
from workbench.torch_api.ops import is_random

pytestmark = pytest.mark.integration
NAME = "memory_budget"


def spec(**options):
    return PassSpec(name=NAME, options=options)


def long(joint=(), layers=1):
    """Sequences so long that activations, and not gathered weights, are most of what is saved."""
    return small(FSDP4, joint, layers=layers).override({"data.seq_len": 256})


@pytest.fixture(scope="module")
def two(fake4):
    """llama3 of two layers on dp_shard 4, without values."""
    return capture(author(long(layers=2), fake4))


def through(joint, *specs):
    """(record of the last pass, pair)"""
    joint = joint.fork()
    records = run_joint(joint, specs)
    return records[-1], partition(joint)


@pytest.fixture(scope="module")
def planned(two):
    """`through` under budgets of these fractions, each planned once."""
    return cache(lambda fraction, *before: through(two, *before, spec(fraction=fraction)))


@pytest.mark.parametrize(("fraction", "before"), [(0.8, ()), (0.5, ("reshard_after_forward",))])
def test_the_partition_is_as_planned_and_uses_the_budget(planned, fraction, before):
    record, pair = planned(fraction, *before)
    plan = facts_of(pair.forward).plan
    assert record.verdict("effect").outcome is Outcome.PASS, record.verdict("effect").message
    assert 0.7 * plan.budget < saved_bytes(pair) == plan.cut.bytes <= plan.budget < plan.before.bytes
    assert plan.cut.peak < plan.before.peak and 0 < plan.cut.share < 1
    assert {row.name for row in plan.choices if row.act == "save"} == set(plan.cut.saved)


def test_less_memory_costs_the_products_of_the_plan(planned):
    pair = planned(0.5, "reshard_after_forward")[1]
    plan = facts_of(pair.forward).plan
    forward = {node.name for node in pair.forward.graph.nodes}
    products = {node.name for node in pair.backward.graph.nodes if node.name in forward and is_compute(node)}
    assert {name for name, ms in plan.cut.again.items() if ms} == products != set()
    assert plan.ms > 0 and sum(row.ms for row in plan.choices) == pytest.approx(sum(plan.cut.again.values()))


def test_a_budget_that_holds_all_changes_nothing_and_says_so(two):
    record, pair = through(two, spec(fraction=1.0))
    found = record.verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT and "what is saved without a budget fits" in found.message
    assert saved_bytes(pair) == saved_bytes(partition(two.fork()))


def test_tags_of_a_rule_decide_before_the_budget(two):
    checkpoint_rule("silus")(lambda node: True if "silu" in node.name else None)
    record, pair = through(two, "silus", spec(fraction=0.7))
    rows = [row for row in facts_of(pair.forward).plan.choices if row.operator == "silu"]
    assert len(rows) == 2 and {row.act for row in rows} == {"save"}
    assert record.verdict("effect").outcome is Outcome.PASS


def four_layers(world, drop):
    """The capture of four layers, behind each of which the module `drop` drops elements."""
    layers = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.Sigmoid(), drop)]
    return capture(author_module(Summed(*layers), world, None, batch=lambda: (torch.empty(64, 8),)))


def test_random_numbers_are_saved_and_would_not_be_without_a_tag(fake4, monkeypatch):
    joint = four_layers(fake4, nn.Dropout())
    assert not [node for node in through(joint, spec(fraction=0.7))[1].backward.graph.nodes if is_random(node)]
    monkeypatch.setattr(plans, "may_differ", lambda *_: False)
    assert [node for node in through(joint, spec(fraction=0.7))[1].backward.graph.nodes if is_random(node)]


class Noisy(nn.Module):
    def forward(self, x):
        return x * noise(x.detach())


def test_an_operator_of_an_unknown_library_runs_again_only_if_it_is_listed(fake4):
    joint = four_layers(fake4, Noisy())
    for listed, again in ((), 0), ((NOISE,), 4):
        record, pair = through(joint, spec(fraction=0.7, recomputable=listed))
        assert sum(unknown_operator(node) == NOISE for node in pair.backward.graph.nodes) == again
        effect = record.verdict("effect")
        assert (f"{NOISE} may draw random numbers" in effect.message) is not bool(again), effect.message


@pytest.mark.parametrize(("pool", "mesh"), [
    ("pool2", {"dp_shard": 2}), pytest.param("pool4", FSDP_TP, marks=pytest.mark.nightly)], indirect=["pool"], ids=str)
def test_ranks_train_bitwise_as_without(pool, mesh):
    recipe = small(mesh, ("reshard_after_forward", {"name": NAME, "fraction": 0.8}))
    for found in pool.run(trajectory, recipe):
        assert found["differing"] == [] and found["schedule"] == "PASS"
        assert set(found["outcomes"].values()) == {"PASS"}


@pytest.mark.parametrize(("share", "told"), [
    (1.0, ("saved beyond the plan: ", "bytes are saved, and the budget is ", "planned to be computed again, and not")),
    (0.05, ("planned and not saved: ",))])
def test_a_partition_under_another_budget_is_found_out(two, planned, monkeypatch, share, told):
    plan = facts_of(planned(0.8)[1].forward).plan

    def wrong(gm, example_inputs, *, options):
        facts = facts_of(gm)
        facts.plan, facts.partition_options[plans.BUDGET] = plan, share
        return gm

    monkeypatch.setitem(registry._PASSES, NAME, replace(registry.find_pass(NAME), function=wrong))
    found = through(two, spec(fraction=0.8))[0].verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT and all(text in found.message for text in told)


def test_a_budget_below_the_smallest_cut_and_two_budgets_are_refused(two):
    with pytest.raises(WorkbenchError, match="a budget of 0 bytes is less than the .* that torch's smallest cut saves; "
                                             "most of it holds all_gather.*reshard_after_forward before it"):
        through(two, spec(gib=0.0))
    with pytest.raises(WorkbenchError, match="'memory_budget': .*give one of them"):
        choose(spec(gib=1, fraction=0.5), JOINT, "joint_passes")


def test_the_plan_as_a_table(fake4):
    recipe = long(({"name": NAME, "fraction": 0.6},))
    planned = memory_plan(recipe, fake4)
    text = str(planned)
    assert "activation_memory_budget is 0." in text and "layers.*.feed_forward" in text and "predicted peak" in text
    assert " recompute " in text and planned.to_json()
    with pytest.raises(WorkbenchError, match="lists no memory_budget: add it to joint_passes"):
        memory_plan(small(FSDP4), fake4)


@pytest.mark.nightly
def test_the_front_has_all_of_torchs_budgets(fake4):
    planned = memory_plan(long(({"name": NAME, "fraction": 0.6},)), fake4, front=True)
    assert [cut.share for cut in planned.front] == [i / 10 for i in range(10, 0, -1)]
    assert planned.front[0] == planned.plan.before and "activation_memory_budget = 0.1" in str(planned)
