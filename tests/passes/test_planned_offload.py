"""memory_budget's third choice, the host: taken where it adds least time, carried out by offload_activations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from on_ranks import FSDP4, small, trajectory

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.graph.capture import capture
from workbench.graph.facts import facts_of
from workbench.graph.partition import partition
from workbench.graph.read.nodes import layer_of
from workbench.graph.saving.host import exposed_ms
from workbench.graph.saving.solver import solve
from workbench.graph.saving.values import HostCopy
from workbench.passes.memory_budget import BudgetOptions
from workbench.passes.memory_budget import transform as budget_pass
from workbench.passes.offload_activations import OffloadOptions
from workbench.passes.offload_activations import transform as offload_pass
from workbench.pipeline.run_passes import prove_partition, run_joint, run_partitioned
from workbench.recipe.recipe import RecipeError
from workbench.recipe.sections import PassSpec
from workbench.torch_api.devices.profile import device_spec
from workbench.torch_api.devices.specs import DEVICES

pytestmark = pytest.mark.integration
FAST, SLOW = 1e5, 0.1  # 1e9 bytes/s
SENT = {"name": "offload_activations", "choose": "planned"}


def budget(**options):
    return {"name": "memory_budget", "fraction": 0.6, "offload": True, **options}


@pytest.fixture(scope="module")
def joint(fake4):
    """llama3 of two layers on dp_shard 4, without values."""
    return capture(author(small(FSDP4, layers=2).override({"data.seq_len": 256}), fake4))


@pytest.fixture
def link(monkeypatch):
    """Give the device another bandwidth to the host."""
    def give(gbps):
        spec = replace(DEVICES["h100"], host_gbps=gbps, latency_us=0.0)
        monkeypatch.setattr(budget_pass, "device_spec", lambda _: spec)

    return give


def plan(joint, **options):
    return budget_pass.plan_of(joint.fork().graph, BudgetOptions(**({"fraction": 0.6, "offload": True} | options)))[1]


def through(joint, **options):
    """(record of memory_budget, record of offload_activations)"""
    joint = joint.fork()
    records = run_joint(joint, [PassSpec(name="memory_budget", options={"fraction": 0.6, "offload": True} | options)])
    pair = partition(joint)
    prove_partition(records, pair)
    sent, _ = run_partitioned(pair, [PassSpec(name="offload_activations", options={"choose": "planned"})])
    return records[-1], sent[-1]


def test_over_a_fast_link_the_host_takes_what_would_run_again(joint, link):
    link(FAST)
    without, found = plan(joint, offload=False), plan(joint)
    assert found.offloaded and found.ms < without.ms and found.added_ms < without.added_ms
    assert found.saved_bytes <= found.budget == without.budget
    assert "offload" in str(found) and f"sends {sum(c.bytes for c in found.offloaded):,} to the host" in found.summary


@pytest.mark.parametrize("gbps", [SLOW, SLOW / 100])
def test_over_a_slow_link_nothing_goes_to_the_host(joint, link, gbps):
    link(gbps)
    without, found = plan(joint, offload=False), plan(joint)
    assert not found.offloaded and found.saved_bytes == without.saved_bytes
    assert found.added_ms == found.ms == pytest.approx(without.ms)


def test_it_is_off_unless_it_is_asked_for(joint, link):
    link(FAST)
    producers, _ = budget_pass.plan_of(joint.fork().graph, BudgetOptions(fraction=0.6))
    assert all(each.host is None for made in producers for each in made.results)


def test_a_machine_whose_link_was_not_measured_is_told(joint):
    assert not device_spec("h200x1").host_known
    found = plan(joint, device="h200x1")
    assert not found.offloaded
    assert found.note == ("nothing is offered to the host: h200x1 has no measured bandwidth to it; "
                          "`workbench calibrate` measures one")
    assert found.summary.endswith(found.note)
    with pytest.raises(WorkbenchError) as error:
        plan(joint, device="h200x1", to_host=("*:silu",))
    assert str(error.value) == f"memory_budget: to_host is given, and {found.note}"


@pytest.mark.parametrize(("copies", "late"), [
    ([(1.0, 5.0, 5.0), (1.0, 4.0, 4.0)], 0.0),  # both ways have room
    ([(3.0, 2.0, 9.0)], 1.0),  # the forward ends before the copy does
    ([(3.0, 9.0, 1.0)], 2.0),  # the backward needs it before it is back
    ([(3.0, 5.0, 9.0), (3.0, 5.0, 9.0)], 1.0),  # one after another
    ([(2.0, 1.0, 1.0), (2.0, 1.0, 1.0)], 6.0),  # both ways
])
def test_copies_are_exposed_by_what_compute_does_not_hide(copies, late):
    assert exposed_ms(HostCopy(*each) for each in copies) == pytest.approx(late)


def test_no_choice_on_a_small_graph_is_better(joint, link):
    """Every choice of what runs again and what goes to the host, over one layer's feed-forward."""
    link(50.0)
    producers, _ = budget_pass.plan_of(joint.fork().graph, BudgetOptions(fraction=0.6, offload=True))
    inside = [made for made in producers if layer_of(made.node) == 1 and not made.fixed][-6:]
    for made in inside:
        made.inputs = [each for each in made.inputs if each.producer in inside]
        each = made.results[0]  # so little compute behind each that some copies are exposed
        if each.host is not None:
            each.host = replace(each.host, left=each.host.left / 8, due=each.host.due / 8)
    size = sum(e.bytes for made in inside for e in made.results if e.read)
    assert sum(made.results[0].host is not None for made in inside) >= 3
    kinds = set()
    for share in (1.0, 0.6, 0.3, 0.1):
        best = math.inf
        for acts in itertools.product("srh", repeat=len(inside)):
            act = dict(zip(inside, acts, strict=True))
            wanted = {e for made in inside for e in made.results if e.read}
            wanted |= {e for made in inside if act[made] == "r" for e in made.inputs}
            sent = [e.host for e in wanted if act[e.producer] == "h"]
            if None in sent or sum(e.bytes for e in wanted if act[e.producer] == "s") > share * size:
                continue
            best = min(best, sum(m.ms for m in inside if act[m] == "r") + exposed_ms(sent))
        found = solve(inside, int(share * size))
        assert found is not None and found.ms == pytest.approx(best, rel=1e-4, abs=1e-7)
        assert found.bytes <= share * size and found.bound_ms == pytest.approx(found.ms, rel=1e-3, abs=1e-7)
        kinds.add((bool(found.sent), bool(found.repeated)))
    assert len(kinds) > 1


def test_the_plan_is_carried_out(joint, link):
    link(FAST)
    planned, sent = through(joint)
    told = sent.verdict("effect")
    assert [v.outcome for v in planned.verdicts if v.check == "effect"] == ["PASS", "PASS"] and told.outcome == "PASS"
    found = facts_of(sent.after[0]).plan
    assert told.evidence["offloaded"] == len(found.offloaded)
    assert told.evidence["saved_bytes"][1] == found.saved_bytes <= found.budget < told.evidence["saved_bytes"][0]
    assert planned.verdicts[1].evidence["offloaded_bytes"] == told.evidence["bytes"]


def test_patterns_decide(joint, link):
    link(SLOW)
    found = plan(joint, to_host=("layers.1.feed_forward:silu",))
    assert [(c.module, c.operator, c.fixed) for c in found.offloaded] == [
        ("layers.1.feed_forward", "silu", "to_host layers.1.feed_forward:silu")]
    assert found.exposed_ms > 0
    link(FAST)
    kept = plan(joint, keep=("layers.*.feed_forward:silu",), fraction=0.8)
    assert {c.choice for c in kept.choices if c.operator == "silu"} == {"save"} and kept.offloaded


@pytest.mark.parametrize(("options", "message"), [
    ({"to_host": ("layers.0.attention:*attention*",)},
     "to_host 'layers.0.attention:.attention.' matches no tensor that may go to the host; there are embedding, "),
    ({"to_host": ("*:silu",), "keep": ("layers.0.*",)}, "keep 'layers.0..' and to_host '.:silu' both match silu"),
    ({"to_host": ("*:silu",), "recompute": ("*:silu",)}, "recompute '.:silu' and to_host '.:silu' both match silu"),
])
def test_bad_patterns_are_told(joint, options, message):
    with pytest.raises(WorkbenchError, match=message):
        plan(joint, **options)


@pytest.mark.parametrize(("listed", "passes", "message"), [
    (budget(), (), "joint_passes[0]: with these options pass 'memory_budget' needs 'offload_activations' with choose = "
                   "\"planned\": list it so, or change them"),
    (budget(), ("offload_activations",), "joint_passes[0]: with these options pass 'memory_budget' needs "
                                         "'offload_activations' with choose = \"planned\": list it so, or change them"),
    (budget(offload=False), (SENT,), "passes[0]: with these options pass 'offload_activations' needs 'memory_budget' "
                                     "with offload = true: list it so, or change them"),
    (budget(offload=False, to_host=["*:mm"]), (), "joint_passes[0]: to_host is given, and offload is false: set it to "
                                                  "true"),
])
def test_half_of_the_two_passes_is_refused_where_the_recipe_is_read(listed, passes, message):
    with pytest.raises(RecipeError) as error:
        small(FSDP4, (listed,), passes)
    assert str(error.value) == f"recipe 'small': {message}"


def test_a_plan_that_sends_nothing_says_so(joint, link):
    link(SLOW)
    told = through(joint)[1].verdict("effect")
    assert told.outcome == "NO_EFFECT" and told.message == "the plan of memory_budget sends nothing to the host"


def test_without_a_plan_it_says_so(joint):
    pair = partition(joint.fork())
    found = run_partitioned(pair, [PassSpec(name="offload_activations", options={"choose": "planned"})])[0][0]
    assert found.verdict("effect").message == "no memory_budget has planned what goes to the host"


# --- seeded faults


def test_a_planned_tensor_that_was_not_sent_is_named(joint, link, monkeypatch):
    link(FAST)
    lost, honest = [], offload_pass.planned

    def forget(forward, nodes):
        found, missing = honest(forward, nodes)
        if not lost:  # where the pass chooses; its effect asks again
            lost.append(found.popitem()[1].name)
        return found, missing

    monkeypatch.setattr(offload_pass, "planned", forget)
    told = through(joint)[1].verdict("effect")
    assert told.outcome == "NO_EFFECT" and told.message == f"planned for the host and not sent: {lost[0]}"


def test_a_plan_that_names_what_cannot_leave_is_found_out(joint, link, monkeypatch):
    link(FAST)
    honest = budget_pass.plan_of

    def wrong(gm, options):
        producers, found = honest(gm, options)
        kept = next(c.name for c in found.saved if "attention" in c.operator)
        return producers, replace(found, choices=tuple(
            replace(c, choice="offload") if c.name == kept else c for c in found.choices))

    monkeypatch.setattr(budget_pass, "plan_of", wrong)
    told = through(joint)[1].verdict("effect")
    assert told.outcome == "NO_EFFECT" and "planned for the host and not sent: getitem" in told.message


def test_a_link_that_costs_nothing_changes_the_plan_and_the_timeline_finds_out(joint, link):
    """The plan believes in a link that hides all copies; by the pass's own device they are exposed."""
    link(FAST)
    believed = plan(joint)
    told = through(joint)[1].verdict("effect")
    was, now = told.evidence["exposed_ms"]
    assert believed.exposed_ms < 1e-3 < now - was
    assert OffloadOptions().device == BudgetOptions().device


@pytest.mark.ranks
@pytest.mark.nightly
def test_two_ranks_train_bitwise_as_without(pool2):
    listed = budget(fraction=0.5, to_host=["layers.*.feed_forward:silu", "layers.*:add"])
    recipe = small({"dp_shard": 2}, ("reshard_after_forward", listed), (SENT,), layers=2)
    for found in pool2.run(trajectory, recipe):
        assert found["differing"] == [] and found["schedule"] == "PASS"
        assert set(found["outcomes"].values()) == {"PASS"} and "offload_activations" in found["outcomes"]
