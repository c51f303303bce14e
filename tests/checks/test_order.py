"""The check `order`: what a chosen order hides stays hidden in later graphs, in code and in a profile."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from graphs_by_hand import C10D, DIM, group_name, trace

from workbench import Effect, Numerics, Options, Outcome, PassContract, PassRecord, Stage
from workbench.checks import order
from workbench.checks.order import ChosenOrder
from workbench.graph.facts import Known
from workbench.graph.read.simulated_run import COMPUTE, CPU_LATE, HIDDEN, Span, StepTimeline
from workbench.graph.read.timeline import costs_of
from workbench.passes.registry import RegisteredPass
from workbench.torch_api.aot import clone

WIDE = torch.ones(256, 1024)


def start(shard):
    return C10D.all_gather_into_tensor(shard, 4, group_name())


def behind_pointwise(shard, x):
    """40 pointwise operators of 1 MB each stand between the gather's launch and its wait."""
    begun = start(shard)
    for _ in range(40):
        x = torch.sin(x)
    return [C10D.wait_tensor(begun) @ torch.ones(DIM, DIM), x]


def behind_matmul(shard, x):
    begun = start(shard)
    product = x @ x.t()
    return [C10D.wait_tensor(begun) + 1, product]


def separately(options, gm):
    return costs_of(gm, "h100")


def fused(options, gm):
    return costs_of(gm, "h100", fused=True)


def record(name, stage, before, after, known=None, costs=None):
    """The record of a pass whose effect happened, added to what is known of a run."""
    known = known or Known()
    contract = PassContract(name, Stage(stage), Numerics.EXACT, "")
    item = RegisteredPass(contract, print, lambda *_: Effect(True), order_costs=costs)
    found = PassRecord(item, Options(), (before,), (after,), 0.0, 0.0, known)
    orders = [other.chosen_order for other in reversed(known.records)]
    found.order = next((chosen for chosen in orders if chosen is not None), None)
    if costs is not None:
        found.chosen_order = order.chosen_by(found.item, found.after, found.options)
    known.records.append(found)
    return found


def code(gm, *calls):
    """A compilation of `gm`: its kernel calls as (kind, nodes)."""
    kept = {"format": 1, "calls": [(f"{kind}_{i}", kind, nodes, ()) for i, (kind, nodes) in enumerate(calls)],
            "same": {}, "removed": [], "missing": []}
    return SimpleNamespace(source_code="", _workbench_kernels=kept)


def names(gm, part):
    return tuple(n.name for n in gm.graph.nodes if n.op == "call_function" and part in str(n.target))


def chosen(gm, costs):
    """The record of a pass that has put the collectives of `gm` where they stand."""
    return record("places", "partitioned", gm, gm, costs=costs)


def lowered(early, gm, *calls):
    """The record of Inductor's code with these calls, behind the pass of `early`, in a run of its own."""
    known = early.known.fork()
    return record("lowers", "lowering", gm, code(gm, *calls), known)


def test_an_order_by_the_costs_of_separate_kernels_is_lost_where_pointwise_operators_fuse(fake4):
    gm = trace(behind_pointwise, torch.ones(2, DIM), WIDE)
    early = chosen(gm, separately)
    assert early.verdict("order").outcome is Outcome.PASS and early.verdict("order").evidence["hidden"] == 1
    late = lowered(early, gm, ("collective", names(gm, "all_gather")), ("cpp", names(gm, "sin")),
                   ("wait", names(gm, "wait_tensor")), ("extern", names(gm, "mm")))
    assert late.verdict("order").outcome is Outcome.FAIL
    assert "0 of 1 collectives hide in Inductor's code" in late.verdict("order").message
    places, lowers = late.known.records
    assert places.verdict("effect").outcome is Outcome.NO_EFFECT
    assert places.verdict("effect").message.startswith("lowers lost the order that it chose: 0 of 1")
    assert early.verdict("effect").outcome is Outcome.PASS  # another run goes on from the first record
    assert lowers.verdict("effect").outcome is Outcome.PASS


def test_a_wait_that_moves_up_loses_its_matmul_and_is_named(fake4):
    gm = trace(behind_matmul, torch.ones(2, DIM), WIDE)
    early = chosen(gm, fused)
    calls = {"c": ("collective", names(gm, "all_gather")), "w": ("wait", names(gm, "wait_tensor")),
             "m": ("extern", names(gm, "mm")), "p": ("cpp", names(gm, "add"))}
    kept = lowered(early, gm, *map(calls.get, "cmwp"))
    assert kept.verdict("order").outcome is Outcome.PASS
    assert [r.verdict("effect").outcome for r in kept.known.records] == [Outcome.PASS] * 2
    for lost in ("cwmp", "cwpm", "mcwp"):
        found = lowered(early, gm, *map(calls.get, lost)).verdict("order")
        assert found.outcome is Outcome.FAIL and found.evidence["first"] == "forward all_gather_into_tensor"
        assert "; the first lost one is forward all_gather_into_tensor, with 0.000 ms of compute" in found.message


def test_a_later_graph_pass_that_moves_the_wait_up_fails_too(fake4):
    gm = trace(behind_matmul, torch.ones(2, DIM), WIDE)
    early = chosen(gm, fused)
    moved = clone(gm)
    (begun,), (wait,) = ([n for n in moved.graph.nodes if n.name in names(moved, part)]
                         for part in ("all_gather", "wait_tensor"))
    begun.append(wait)
    late = record("tidies", "partitioned", gm, moved, early.known)
    assert late.verdict("order").outcome is Outcome.FAIL
    assert early.verdict("effect").outcome is Outcome.NO_EFFECT
    replay = record("replays", "replay", gm, gm, early.known)
    assert replay.verdict("order") is None  # a replay repeats what was lowered


def test_calls_that_were_not_observed_are_unknown(fake4):
    gm = trace(behind_matmul, torch.ones(2, DIM), WIDE)
    found = lowered(chosen(gm, fused), gm, ("extern", names(gm, "mm"))).verdict("order")
    assert found.outcome is Outcome.UNKNOWN and "calls of 1 of 1 collectives were not observed" in found.message


def test_95_percent_must_stay_hidden():
    hidden = {f"forward gather_{i}": 1 for i in range(30)}
    for lost, outcome in ((1, Outcome.PASS), (2, Outcome.FAIL)):
        now = {name: order.Between(int(i >= lost), 0.1, 0.1) for i, name in enumerate(hidden)}
        found = order._kept(ChosenOrder("places", partial(fused, None), hidden), now, "the graph")
        assert found.outcome is outcome and found.evidence["lost"] == lost


BARE = "nothing computes meanwhile"


def profiled(count, spans, ranks=(), total=2.0):
    """The verdict on a profile of the collectives 0, 1, ... of which all were to be hidden.

    spans: of each one in turn, (ms, exposed ms, what it is limited by, ms beside another).
    """
    names = [f"forward {i}" for i in range(count)]
    chosen = ChosenOrder("places", partial(fused, None), dict.fromkeys(names, 1))
    of_collectives = [Span(str(i), "dp", i, i + ms, exposed, limit, part="forward", shared=shared)
                      for i, (ms, exposed, limit, shared) in enumerate(spans)]
    timeline = StepTimeline("measured on paper", (Span("gemm", COMPUTE, 0, 2.0), *of_collectives), total, 2.0)
    return chosen.in_profile(timeline, [dict.fromkeys(names, ms) for ms in ranks])


def test_a_profile_in_which_a_collective_was_not_hidden_fails():
    assert profiled(2, [(1.0, 0.4, "", 0.0)] * 2).outcome is Outcome.PASS
    bare = [(1.0, 0.6, "", 0.0)] * 2
    found = profiled(2, bare)
    assert found.outcome is Outcome.FAIL and "0 of 2 collectives ran behind compute" in found.message
    assert "forward 0, for 0.600 of its 1.000 ms" in found.message
    assert profiled(2, [(1.0, 0.0, "", 0.0)]).outcome is Outcome.UNKNOWN
    # 0.55 of the 1.0 ms waited for a rank on which it took 0.45 ms; where each took 0.9, the order left it bare
    assert profiled(2, bare, [0.45]).outcome is Outcome.PASS
    slow = profiled(2, bare, [0.9])
    assert slow.outcome is Outcome.FAIL and "forward 0, for 0.500 of its 0.900 ms" in slow.message


def test_a_collective_that_was_over_before_the_cpu_had_launched_compute_tells_nothing():
    """Five of twenty were late; with two more that compute could have hidden, the order is lost."""
    def verdict(late, bare):
        hidden = [(1.0, 0.0, HIDDEN, 0.0)] * (20 - late - bare)
        return profiled(20, [(1.0, 1.0, CPU_LATE, 0.0)] * late + [(1.0, 1.0, BARE, 0.0)] * bare + hidden)

    assert verdict(0, 1).outcome is verdict(1, 0).outcome is Outcome.PASS
    found = verdict(5, 1)
    assert found.outcome is Outcome.UNKNOWN and (found.evidence["late"], found.evidence["lost"]) == (5, 1)
    assert "14 of 20 collectives ran behind compute" in found.message and "5 were over before the CPU" in found.message
    found = verdict(5, 2)
    assert found.outcome is Outcome.FAIL and "the first exposed one is forward 5" in found.message


def test_a_step_that_waited_for_a_cpu_tells_nothing():
    """Ten short collectives beside shorter kernels; the same beside each other, in a step that communicates, are lost.

    On the other rank a collective that waits for a late CPU lasts long: its time is not the collective's.
    """
    def verdict(ms, total, ranks=(), shared=0.0):
        return profiled(10, [(ms, ms, BARE, shared)] * 10, ranks, total)

    found = verdict(0.01, 30.0)
    assert found.outcome is Outcome.UNKNOWN and found.evidence["idle_ms"] == pytest.approx(27.9)
    assert "for 27.9 of the step's 30.0 ms the GPU neither computed nor communicated" in found.message
    assert verdict(2.5, 30.0).outcome is Outcome.FAIL  # 25 ms of collectives, and nothing behind which they hide
    assert verdict(2.5, 30.0, shared=1.5).outcome is Outcome.UNKNOWN  # where they overlap, the time counts once
    assert verdict(2.5, 30.0, [0.01]).outcome is Outcome.UNKNOWN
    assert verdict(0.01, 3.0).outcome is Outcome.FAIL
