import torch
import torch.distributed as dist
from graphs_by_hand import C10D, gather, group_name, shards, trace, two_layer_graph
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.checks.lint import lint
from workbench.checks.verdicts import Outcome
from workbench.graph.facts import GraphFacts, set_facts
from workbench.graph.read.collectives import exposed_in_node_order, launches, list_collectives
from workbench.graph.read.peak import live_bytes
from workbench.graph.read.simulated_run import simulated


def test_listing_says_what_moves_where(fake4):
    first, second = list_collectives(two_layer_graph())
    assert (first.kind, first.axis, first.group_size, first.shape, first.dtype) == (
        "all_gather", "dp_shard", 4, (2, 8), "float32")
    assert (first.bytes_in, first.bytes_out, first.payload) == (64, 256, 256)
    assert first.waits and first.waits != second.waits
    assert launches([first, second]) == {("all_gather", "dp_shard"): 2}


def test_only_what_no_matmul_can_hide_is_exposed(fake4):
    gm = two_layer_graph()
    assert [c.node for c in exposed_in_node_order(gm)] == [c.node for c in list_collectives(gm)]
    wait = next(n for n in gm.graph.nodes if n.name == list_collectives(gm)[1].waits[0])
    last = [n for n in gm.graph.nodes if n.op == "call_function" and "mm" in str(n.target)][-1]
    last.prepend(wait)
    assert [c.node for c in exposed_in_node_order(gm)] == [list_collectives(gm)[0].node]


def test_out_variant_and_coalesced_launches_are_found(fake4):
    def out_variant(shard):
        whole = shard.new_empty(4 * shard.shape[0], shard.shape[1])
        mine = whole.narrow(0, 0, shard.shape[0]).copy_(shard)
        return C10D.wait_tensor(C10D.all_gather_into_tensor_out(mine, 4, group_name(), out=whole))

    def coalesced(a, b):
        return [C10D.wait_tensor(t) for t in C10D.all_gather_into_tensor_coalesced([a, b], 4, group_name())]

    a, b, _ = shards(4)
    (one,) = list_collectives(trace(out_variant, a))
    assert (one.kind, one.bytes_in, one.bytes_out, len(one.waits)) == ("all_gather", 64, 256, 1)
    (both,) = list_collectives(trace(coalesced, a, b))
    assert (both.bytes_in, both.bytes_out, len(both.waits)) == (128, 512, 2)


def test_a_collective_that_blocks_is_listed_and_exposed(fake4):
    """DTensor's all-to-all from one sharded dimension to another."""
    gm = trace(lambda x: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group_name()) @ torch.ones(2, 2), shards(4)[2])
    (found,) = list_collectives(gm)
    assert (found.kind, found.axis, found.group_size, found.shape) == ("all_to_all", "dp_shard", 4, (3, 8))
    assert (found.bytes_in, found.bytes_out, found.waits) == (96, 96, (found.node,))
    assert exposed_in_node_order(gm) == [found]
    (span,) = simulated(gm).collectives
    assert span.exposed == span.end - span.begin > 0 and span.limit == "the operator blocks until the collective ends"


def test_a_second_group_over_the_same_ranks_is_the_same_axis_and_an_unknown_one_has_none(fake4):
    twin = dist.new_group([0, 1, 2, 3]).group_name
    gm = trace(lambda s: C10D.wait_tensor(C10D.all_gather_into_tensor(s, 4, twin)), shards(4)[0])
    (found,) = list_collectives(gm)
    assert found.group == twin != group_name() and found.axis == "dp_shard"
    set_facts(gm, GraphFacts())
    assert [(c.group, c.axis) for c in list_collectives(gm)] == [(twin, None)]


def test_symbolic_sizes_are_read_as_hints_and_add_no_guards(fake4):
    def gathered(shard):
        return gather(shard) * 2

    gm = make_fx(gathered, tracing_mode="symbolic")(torch.ones(2, 8))
    size = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0]
    guards = len(size.node.shape_env.guards)
    (found,) = list_collectives(gm)
    assert (found.shape, found.bytes_in, found.bytes_out) == ((2, 8), 64, 256)
    assert live_bytes(gm).peak_bytes == 64 + 256 + 256
    assert lint((gm,), (gm,)).outcome is Outcome.PASS
    assert len(size.node.shape_env.guards) == guards
