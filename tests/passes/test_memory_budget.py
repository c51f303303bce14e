"""memory_budget: the plan is the best within its budget, and the partitioner keeps it; each gate sees its fault."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from on_ranks import FSDP4, FSDP_TP, small, trajectory
from torch.utils.checkpoint import CheckpointPolicy

from workbench.authoring.author import author, author_module
from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.capture import capture
from workbench.graph.facts import facts_of
from workbench.graph.partition import partition
from workbench.graph.read.nodes import layer_of
from workbench.graph.saving import values
from workbench.graph.saving.choose import choose
from workbench.graph.saving.partitioner import torch_cut
from workbench.graph.saving.solver import solve
from workbench.graph.saving.values import read_values, repeating_ms
from workbench.lab.memory_budget import BudgetOptions
from workbench.lab.memory_budget import transform as budget_pass
from workbench.lab.memory_budget.plan_table import compared, memory_plan
from workbench.passes import registry
from workbench.passes.activation_checkpointing import checkpoint_rule
from workbench.pipeline import build as building
from workbench.pipeline.build import build
from workbench.pipeline.run_passes import JOINT, run_joint, saved_bytes
from workbench.pipeline.run_passes import choose as find_and_validate
from workbench.recipe.recipe import RecipeError, load_recipe
from workbench.recipe.sections import PassSpec

pytestmark = pytest.mark.integration
NAME = "memory_budget"


def spec(**options):
    return PassSpec(name=NAME, options=options)


def long(joint=()):
    """Sequences so long that activations, and not gathered weights, are most of what is saved."""
    return small(FSDP4, joint, layers=2).override({"data.seq_len": 256})


@pytest.fixture(scope="module")
def two(fake4):
    """llama3 of two layers on dp_shard 4, captured both ways, without values."""
    authored = author(long(), fake4)
    return {by: capture(authored, by=by) for by in ("joint", "traced")}


@pytest.fixture(scope="module")
def producers(two):
    gm = two["joint"].graph
    return read_values(gm, repeating_ms(gm, "h100", lambda _: None, True))


def through(joint, *specs):
    """(record of memory_budget, pair)"""
    joint = joint.fork()
    records = run_joint(joint, specs)
    pair = partition(joint)
    return records[-1], pair


def needed(producers):
    return sum(each.bytes for made in producers for each in made.results if each.read)


@pytest.mark.parametrize("by", ["joint", "traced"])
@pytest.mark.parametrize("fraction", [1.0, 0.8, 0.6])
def test_the_plan_is_kept(two, by, fraction):
    record, pair = through(two[by], spec(fraction=fraction))
    plan = facts_of(pair.forward).plan
    assert record.verdict("effect").outcome is Outcome.PASS
    assert 0 < saved_bytes(pair) == plan.saved_bytes <= plan.budget
    assert plan.bound_ms <= plan.ms


@pytest.mark.nightly
@pytest.mark.parametrize("dispatch", ["capacity", pytest.param("dropless", marks=pytest.mark.nightly)])
def test_equal_nodes_of_experts_are_planned_once(fake4, dispatch):
    """torch merges equal nodes before it cuts, and a gradient's scaling has no tag of the backward."""
    recipe = load_recipe("deepseek_v3").override({"data.seq_len": 64, "mesh.tp": 2, "mesh.dp_shard": 2,
                                                  "model.n_layers": 2, "model.dispatch": dispatch})
    record, pair = through(capture(author(recipe, fake4)), "reshard_after_forward", spec(fraction=0.6))
    assert record.verdict("effect").outcome is Outcome.PASS, record.verdict("effect").message
    assert 0 < saved_bytes(pair) == facts_of(pair.forward).plan.saved_bytes


def test_after_resharding_the_gathered_weights_take_none_of_the_budget(two):
    record, pair = through(two["joint"], "reshard_after_forward", spec(fraction=0.5))
    plan = facts_of(pair.forward).plan
    assert plan.decided_ms > 0 and f"by earlier passes, at most {plan.decided_ms:.4g} ms more" in plan.summary
    assert record.outcome is Outcome.PASS and plan.least == 0
    assert not [c for c in plan.saved if c.operator.startswith("all_gather")]


FLOAT8 = PassSpec(name="float8_matmul", options={"smallest": 16})


@pytest.mark.parametrize("before", [(), ("reshard_after_forward",)], ids=["kept", "resharded"])
def test_what_the_backward_alone_needs_is_made_there_and_has_no_price(two, before):
    """Transposed casts of float8, which only gradients read."""
    record, pair = through(two["joint"], FLOAT8, *before, spec(fraction=0.5))
    plan, ran = facts_of(pair.forward).plan, {n.name for n in pair.forward.graph.nodes}
    late = [c for c in plan.choices if c.fixed == "only the backward needs it"]
    assert {c.operator for c in late} >= {"clone"} and {(c.choice, c.ms) for c in late} == {("recompute", 0.0)}
    assert ran.isdisjoint(c.name for c in late)
    assert record.verdict("effect").outcome is Outcome.PASS


def test_a_choice_where_there_is_none_is_found_out(two, monkeypatch):
    monkeypatch.setattr(values, "_needed_by_forward", lambda gm, *given: set(gm.graph.nodes))
    found = through(two["joint"], FLOAT8, spec(fraction=0.5))[0].verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT and "planned and not saved: clone" in found.message


@pytest.mark.parametrize(("pool", "mesh"), [
    pytest.param("pool2", {"dp_shard": 2}, id="dp_shard 2"),
    pytest.param("pool4", FSDP4, id="dp_shard 4", marks=pytest.mark.nightly),
    pytest.param("pool4", FSDP_TP, id="dp_shard 2 x tp 2", marks=pytest.mark.nightly)], indirect=["pool"])
@pytest.mark.ranks
def test_ranks_train_bitwise_as_without(pool, mesh):
    recipe = small(mesh, ("reshard_after_forward", {"name": NAME, "fraction": 0.3, "collectives": True}), layers=2)
    for found in pool.run(trajectory, recipe):
        assert found["differing"] == [] and found["schedule"] == "PASS"
        assert set(found["outcomes"].values()) == {"PASS"}


def test_no_choice_on_a_small_graph_is_better(fake4, producers):
    """Every choice of what runs again, over one layer's feed-forward and what it reads."""
    inside = [made for made in producers if layer_of(made.node) == 1 and not made.fixed][-9:]
    for made in inside:
        made.inputs = [each for each in made.inputs if each.producer in inside]
    size = needed(inside)
    for share in (1.0, 0.7, 0.5, 0.3, 0.1):
        best = float("inf")
        for chosen in itertools.product((False, True), repeat=len(inside)):
            again = {made for made, taken in zip(inside, chosen, strict=True) if taken}
            wanted = {e for made in inside for e in made.results if e.read} | {e for made in again for e in made.inputs}
            saved = sum(e.bytes for e in wanted if e.producer not in again)
            if saved <= share * size:
                best = min(best, sum(made.ms for made in again))
        found = solve(inside, int(share * size))
        assert found is not None and found.ms == pytest.approx(best, rel=1e-6) and found.bytes <= share * size
        assert found.bound_ms == pytest.approx(found.ms, rel=1e-4)


@pytest.fixture(scope="module")
def sweep(two):
    gm = two["joint"].graph
    fresh = read_values(gm, repeating_ms(gm, "h100", lambda _: None, True))
    least = solve(fresh, float("inf"), fewest=True).bytes
    return fresh, [choose(fresh, least + (needed(fresh) - least) * i // 10, "h100") for i in range(11)]


def test_more_memory_never_costs_time_and_the_gap_is_small(sweep):
    _, plans = sweep
    assert plans[-1].ms == 0 and all(a.ms >= (1 - 0.02) * b.ms for a, b in itertools.pairwise(plans))
    assert all(plan.saved_bytes <= plan.budget and plan.gap >= 0 for plan in plans)
    assert max(plan.gap for plan in plans if plan.ms > plans[0].ms / 4) < 0.1


def test_alike_layers_are_treated_alike_unless_that_costs(sweep):
    """At most two kinds of layers, the first ones and the rest; one kind where the budget divides."""
    def kinds(plan):
        layers = {}
        for c in plan.choices:
            if c.module.startswith("layers."):
                _, number, rest = c.module.split(".", 2) if c.module.count(".") > 1 else (*c.module.split("."), "")
                layers.setdefault(number, []).append((rest, c.operator, c.choice))
        return len({tuple(found) for found in layers.values()})

    counts = [kinds(plan) for plan in sweep[1]]
    assert set(counts) == {1, 2} and counts[0] == counts[-1] == 1


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5, 0.3])
def test_torchs_own_budget_takes_no_less_time_for_as_many_bytes(two, sweep, share):
    cut = torch_cut(two["joint"].graph, sweep[0], share)
    assert choose(sweep[0], cut.bytes, "h100").ms <= 1.001 * cut.ms


# --- seeded faults


def faulty(two, monkeypatch, edit):
    """The reason of the effect after `edit(graph, plan)` has changed what the pass made."""
    honest = budget_pass.memory_budget

    def wrong(gm, example_inputs, *, options):
        made = honest(gm, example_inputs, options=options)
        edit(made, facts_of(made).plan)
        return made

    monkeypatch.setitem(registry._PASSES, NAME, replace(registry.find_pass(NAME), function=wrong))
    record, _ = through(two["joint"], spec(fraction=0.6))
    found = record.verdict("effect")
    return found


def node(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


def chosen(plan, choice, operator="mm"):
    return next(c.name for c in plan.choices if (c.choice, c.operator) == (choice, operator))


def test_a_tensor_that_is_not_saved_is_named(two, monkeypatch):
    names = []

    def drop(gm, plan):
        names.append(chosen(plan, "save"))
        node(gm, names[0]).meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE

    found = faulty(two, monkeypatch, drop)
    assert found.outcome is Outcome.NO_EFFECT and f"planned and not saved: {names[0]}" in found.message


def test_a_tensor_saved_beyond_the_plan_is_named_and_breaks_the_budget(two, monkeypatch):
    names = []

    def keep(gm, plan):
        largest = max((c for c in plan.choices if c.choice == "recompute"), key=lambda c: c.bytes)
        names.append(largest.name)
        node(gm, largest.name).meta["recompute"] = CheckpointPolicy.MUST_SAVE

    found = faulty(two, monkeypatch, keep)
    assert found.outcome is Outcome.NO_EFFECT and f"saved beyond the plan: {names[0]}" in found.message
    assert "bytes are saved, and the budget is" in found.message


def test_a_budget_that_the_partitioner_exceeds_is_told(two, monkeypatch):
    def lower(gm, plan):
        facts_of(gm).plan = replace(plan, budget=plan.saved_bytes - 1)

    found = faulty(two, monkeypatch, lower)
    assert found.outcome is Outcome.NO_EFFECT
    assert found.message == f"{found.evidence['saved_bytes']:,} bytes are saved, and the budget is " \
                            f"{found.evidence['saved_bytes'] - 1:,}"


def test_products_that_cost_nothing_change_the_plan_and_are_found_out(two, monkeypatch):
    honest, _ = through(two["joint"], spec(fraction=0.6))
    priced = repeating_ms

    def free(gm, *given):
        return {n: 0.0 if n.name.startswith("mm") else ms for n, ms in priced(gm, *given).items()}

    monkeypatch.setattr(budget_pass, "repeating_ms", free)
    record, pair = through(two["joint"], spec(fraction=0.6))
    assert facts_of(pair.forward).plan.choices != facts_of(honest.after[0]).plan.choices
    found = record.verdict("effect")
    assert found.outcome is Outcome.NO_EFFECT
    assert "the plan counts 0 ms for the products that run again" in found.message


# --- what a user asks for


def test_patterns_keep_and_recompute(two):
    _, pair = through(two["joint"], spec(fraction=0.9, keep=("layers.*.feed_forward:silu",),
                                          recompute=("layers.0.attention:*attention*",)))
    plan = facts_of(pair.forward).plan
    by = {(c.module, c.operator): c for c in plan.choices}
    assert {c.choice for c in plan.choices if c.operator == "silu"} == {"save"}
    attention = [c for (module, operator), c in by.items() if "attention" in operator]
    assert [c.choice for c in attention] == ["recompute", "save"]
    assert by["layers.1.feed_forward", "silu"].fixed == "keep layers.*.feed_forward:silu"


@pytest.mark.parametrize(("options", "message"), [
    ({"gib": 0.0}, "a budget of 0 bytes is less than the .* that must be saved at least; most of it holds all_gather.* "
                   "a gathered parameter, which reshard_after_forward frees"),
    ({"keep": ["layers.*.mlp:mm"]}, r"'layers.\*.mlp:mm' matches no forward operator; there are tok_embeddings:embed"),
    ({"keep": ["layers.0.*"], "recompute": ["*:silu"]}, "keep 'layers.0..' and recompute '.:silu' both match silu"),
])
def test_bad_input_is_told_before_anything_is_compiled(two, options, message):
    with pytest.raises(WorkbenchError, match=message):
        through(two["joint"], spec(**options))


@pytest.mark.parametrize("options", [{"fraction": 1.5}, {"fraction": -0.1}, {"gib": -1.0}, {"gib": 1, "fraction": 0.5}])
def test_budgets_that_are_none(options):
    with pytest.raises(WorkbenchError, match="'memory_budget': .*(less than or equal to 1|greater than or equal to 0"
                                             "|give one of them)"):
        find_and_validate(spec(**options), JOINT, "joint_passes")


@pytest.mark.parametrize("names", [("activation_checkpointing", NAME), (NAME, "activation_checkpointing")])
def test_two_passes_that_choose_are_refused_where_the_recipe_is_read(names):
    with pytest.raises(RecipeError) as error:
        small(FSDP4, names)
    assert str(error.value) == (f"recipe 'small': joint_passes, passes: passes {names[0]!r} and {names[1]!r} conflict: "
                                "keep one of them")


def test_a_rule_registered_after_the_recipe_was_read_is_refused_before_anything_is_captured(fake4, monkeypatch):
    monkeypatch.setattr(building, "author", lambda *_, **__: pytest.fail("authored"))
    recipe = small(FSDP4, ("mine", NAME))
    checkpoint_rule("mine")(lambda node: True)
    with pytest.raises(WorkbenchError) as error:
        build(recipe, fake4)
    assert str(error.value) == f"recipe 'small': passes 'mine' and {NAME!r} conflict: keep one of them"


def test_random_numbers_are_saved(fake4):
    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.nn.functional.dropout(layer(x), 0.5)
            return x.sum()

    with fake4.fake_mode:
        x = torch.empty(4, 8)
    with capture(author_module(Dropped(), fake4, None, batch=lambda: (x,))) as joint:
        graph = joint.graph
    fresh = read_values(graph, repeating_ms(graph, "h100", lambda _: None, False))
    draws = [made for made in fresh if made.why == "a second draw would give other numbers"]
    assert len(draws) == 2 and {made.fixed for made in draws} == {"saved"}


# --- the tool


@pytest.mark.nightly
def test_the_plan_stands_beside_torchs(fake4):
    recipe = long(({"name": NAME, "fraction": 0.6},))
    found = memory_plan(recipe, fake4, front=True)
    assert found.torch is not None and found.torch.bytes <= found.plan.budget < found.now.bytes
    text = str(found)
    assert "torch's activation_memory_budget = " in text and "layers.0-1.feed_forward" in text
    assert found.points()["torch 1"][0] * 2**20 == found.now.bytes
    assert len(found.front) == 21 and found.to_json()
    other = memory_plan(long(({"name": NAME, "fraction": 0.9},)), fake4)
    assert "silu" in compared(found, other) and compared(found, found).endswith("the same choice for each tensor")


def test_a_recipe_without_the_pass(fake4):
    with pytest.raises(WorkbenchError, match="lists no memory_budget: add it to joint_passes"):
        memory_plan(small(FSDP4), fake4)


def test_a_graph_that_was_cut_without_a_plan(two):
    pair = partition(two["joint"].fork())
    assert budget_pass.kept(pair.graphs, BudgetOptions()).reason == "the partitioned graphs have no plan"
