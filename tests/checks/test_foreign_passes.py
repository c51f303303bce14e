"""What passes of another compiler's list showed of our checks, on graphs of our own."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import OFFLOADS, gather, named, scatter, trace, two_layer_graph
from on_ranks import insert, user_pass

from workbench import Options, Outcome, PassRecord
from workbench.checks.agreement import exchange, schedule
from workbench.checks.lint import lint
from workbench.checks.numerics import copies
from workbench.graph.facts import GraphFacts, facts_of, set_facts
from workbench.graph.read.collectives import keep_axes, list_collectives
from workbench.graph.read.peak import live_bytes
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import apply_pass, copy_graph
from workbench.torch_api.aot import clone
from workbench.torch_api.devices.host_copies import run_on_cpu


def record_of(gm, function, **contract):
    """The record of a pass of this function on a graph; `gm` stays as it is."""
    with user_pass("theirs", function, **contract) as name:
        item = find_pass(name)
        after = apply_pass(item, copy_graph(gm), [], Options())
    keep_axes(gm, after)
    return PassRecord(item, Options(), (gm,), (after,), 0.0, 0.0)


def repeat(gm, of=None):
    """Gather a weight once more for the last product: the second one, or what a node made of it."""
    wait, mm = named(gm, "wait_tensor")[1], named(gm, "aten.mm")[1]
    start = wait.all_input_nodes[0]
    shard = start.all_input_nodes[0]
    if of is not None:
        shard = insert(gm, shard, of, shard)
    again = insert(gm, wait, start.target, shard, *start.args[1:])
    mm.replace_input_with(wait, insert(gm, again, wait.target, again))
    return gm


def test_a_gather_repeated_by_design_is_no_fail_and_another_gather_is_one(fake4):
    gm = two_layer_graph()
    assert record_of(gm, repeat).verdict("collectives").outcome is Outcome.FAIL
    told = record_of(gm, repeat, repeats=True).verdict("collectives")
    assert told.outcome is Outcome.PASS
    assert told.message == "512 bytes conserved in 2 launches (before: 2), and 256 bytes repeated in 1"

    def other(gm):
        return repeat(gm, torch.ops.aten.neg.default)

    told = record_of(gm, other, repeats=True).verdict("collectives")
    assert told.outcome is Outcome.FAIL and "512 bytes before, 768 after" in told.message

    def loses_one(gm):
        wait = named(repeat(gm), "wait_tensor")[0]
        wait.replace_all_uses_with(named(gm, "wait_tensor")[1])
        start = wait.all_input_nodes[0]
        gm.graph.erase_node(wait)
        gm.graph.erase_node(start)
        return gm

    assert record_of(gm, loses_one, repeats=True).verdict("collectives").outcome is Outcome.FAIL


@pytest.mark.parametrize("new", [False, True])
def test_a_second_group_over_the_ranks_of_two_axes_keeps_the_axis_of_the_one_it_replaced(fake4, new):
    """new: the pass replaces all launches by new nodes."""
    first, second, twin = (dist.new_group([0, 1, 2, 3]).group_name for _ in range(3))
    gm = trace(lambda shard, x: [scatter(x @ gather(shard))], torch.ones(2, 8), torch.ones(4, 8))
    set_facts(gm, GraphFacts("joint", {"tp": first, "ep_shard": second}, {first: 4, second: 4}))

    def over(gm, *groups):
        for start, group in zip(named(gm, "all_gather") + named(gm, "reduce_scatter"), groups, strict=True):
            if new:
                old, start = start, insert(gm, start, start.target, *start.args)
                old.replace_all_uses_with(start)
                gm.graph.erase_node(old)
            start.args = (*start.args[:-1], group)
        return gm

    record = record_of(over(gm, first, second), lambda gm: over(gm, first, twin))
    assert record.verdict("collectives").outcome is Outcome.PASS
    assert [c.axis for c in list_collectives(record.after[0])] == ["tp", "ep_shard"]
    assert [entry.over for entry in schedule(record.after)] == ["tp", "ep_shard#1"]
    again = record_of(record.after[0], lambda gm: gm)  # the next pass knows it by the facts
    assert facts_of(again.after[0]).groups == {"tp": first, "ep_shard": second, f"ep_shard.{twin}": twin}


def compiled_whole(gm):
    """As Inductor leaves a graph: calls of a function in the place of all operators."""
    inputs, output, runner = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node(), clone(gm)

    def compiled(place, *args):
        return runner(*args)[place]

    with gm.graph.inserting_before(output):
        results = [gm.graph.call_function(compiled, (place, *inputs)) for place in range(len(output.args[0]))]
    for result, value in zip(results, output.args[0], strict=True):
        result.meta["val"] = value.meta["val"]
    output.args = (results,)
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return gm


def test_what_a_compiled_graph_sends_cannot_be_read(fake4):
    told = record_of(two_layer_graph(), compiled_whole).verdict("collectives")
    assert told.outcome is Outcome.UNKNOWN
    assert told.message == "compiled calls other functions than operators, and what it sends cannot be read"


@pytest.mark.ranks
def test_ranks_do_not_agree_on_a_graph_that_was_compiled_away(pool2):
    assert {outcome for told in pool2.run(agreements) for outcome in told} == {"PASS", "UNKNOWN"}


def agreements():
    gm = two_layer_graph()
    return [str(exchange((graph,)).outcome) for graph in (gm, compiled_whole(clone(gm)))]


def offloaded(shard, x, *, early=False):
    """A value that goes to the host after its product, and comes back for another; `early`: it is read in between."""
    from torch._functorch._activation_offloading import offload_ops  # noqa: F401  # which registers the operators

    ao = torch.ops.ao
    hidden = x @ shard
    host = ao.offload(hidden)
    used = torch.relu(hidden)
    total = used.sum()
    host = ao.wait_tensor(host, hidden, used)
    between = hidden.t().sin() if early else torch.cat([x @ used.t(), x @ shard.t()], 1)
    back = ao.reload(host, hidden.device, list(hidden.shape), list(hidden.stride()))
    back = ao.wait_tensor(back, host)
    return [total, between, back.cos()]


@OFFLOADS
def test_a_read_behind_the_wait_that_frees_is_told_and_shows_on_a_cpu(fake4):
    inputs = [torch.randn(8, 8), torch.randn(8, 8)]
    good, bad = (trace(partial(offloaded, early=early), *inputs) for early in (False, True))
    assert lint((good,), (clone(good),)).outcome is Outcome.PASS
    told = lint((bad,), (clone(bad),))
    assert told.outcome is Outcome.FAIL and told.evidence["unusable"]
    assert told.message == "mm is read by sin after wait_tensor has freed it"
    run_on_cpu()
    hidden = inputs[1] @ inputs[0]
    total, _, back = good(*copies(inputs))
    assert torch.equal(back, hidden.cos()) and torch.equal(total, hidden.relu().sum())
    assert bad(*copies(inputs))[1].isnan().all()


@OFFLOADS
def test_what_is_on_the_host_takes_no_memory_of_the_device(fake4):
    def kept(shard, x):
        hidden = x @ shard
        used = torch.relu(hidden)
        total = used.sum()
        return [total, torch.cat([x @ used.t(), x @ shard.t()], 1), hidden.cos()]

    inputs = torch.ones(64, 64), torch.ones(64, 64)
    block = 64 * 64 * 4
    # the inputs; at the concatenation its two pieces and their sum, and hidden only where it was kept
    assert live_bytes(trace(kept, *inputs)).peak_bytes == 2 * block + 4 * block + block + 4
    assert live_bytes(trace(partial(offloaded), *inputs)).peak_bytes == 2 * block + 4 * block + 4
