import pytest
import torch
import torch.distributed as dist
from graphs_by_hand import C10D, group_name, named, shards, trace, two_layer_graph
from on_ranks import key_biased

from workbench import Outcome, capture
from workbench.checks import collectives
from workbench.checks.agreement import difference, other_gradient, schedule
from workbench.checks.operands import gradient_digests
from workbench.graph.read.collectives import list_collectives
from workbench.torch_api.aot import clone, gradient_of


def conserved(before, after, fewer=False):
    return collectives.conserved(list_collectives(before), list_collectives(after), fewer=fewer)


def bucketed(name):
    def forward(shard_a, shard_b, x):
        both = C10D.wait_tensor(C10D.all_gather_into_tensor(torch.cat([shard_a.view(-1), shard_b.view(-1)]), 4, name))
        a, b = both.view(4, -1).split(shard_a.numel(), 1)
        hidden = torch.relu(x @ a.reshape(8, 8))
        return [hidden @ b.reshape(8, 8), hidden]

    return trace(forward, *shards(4))


def test_a_bucket_on_a_group_of_its_own_moves_the_same_bytes_and_has_its_own_place_in_the_order(fake4):
    twin = dist.new_group([0, 1, 2, 3]).group_name
    for name, place in ((group_name(), "dp_shard"), (twin, "dp_shard#1")):
        graph = bucketed(name)
        found = conserved(two_layer_graph(), graph)
        assert found.outcome is Outcome.PASS and schedule([graph])[0][1] == place
        assert found.evidence["all_gather dp_shard"] == {
            "bytes_before": 512, "bytes_after": 512, "launches_before": 2, "launches_after": 1}


def test_a_lost_collective_fails_and_is_named(fake4):
    gm = two_layer_graph()
    before = clone(gm)
    first, second = named(gm, "wait_tensor")
    second.replace_all_uses_with(first)
    start = second.all_input_nodes[0]
    gm.graph.erase_node(second)
    gm.graph.erase_node(start)
    found = conserved(before, gm)
    assert found.outcome is Outcome.FAIL
    assert found.message == ("all_gather dp_shard: 512 bytes before, 256 after "
                             "(lost all_gather_into_tensor_1 of 256 bytes)")
    allowed = conserved(before, gm, fewer=True)
    assert allowed.outcome is Outcome.PASS
    assert allowed.message == "256 of 512 bytes taken out, the rest in 1 launch (before: 2)"
    assert conserved(gm, before, fewer=True).message == (
        "all_gather dp_shard: 256 bytes before, 512 after (new all_gather_into_tensor_1 of 256 bytes)")


def test_the_rank_that_departs_from_most_is_named(fake4):
    a, b = ("all_gather", "dp_shard", "", (2, 8), "float32", 4), ("all_gather", "dp_shard", "", (4, 8), "float32", 4)
    assert difference([[a, b]] * 4) is None
    found = difference([[a, b], [a, b], [b, a], [a, b]])
    assert found is not None
    rank, index, text = found
    assert (rank, index) == (2, 0) and "rank 2 would run all_gather float32[4, 8] over dp_shard(4)" in text
    short = difference([[a, b], [a, b], [a]])
    assert short is not None and "nothing more" in short[2]


def test_a_tensor_that_one_rank_pads_and_another_does_not_is_the_same(fake4):
    """One rank's part of a gradient has fewer rows than the others' parts, so that rank pads it."""
    def whole(x):
        return [C10D.wait_tensor(C10D.reduce_scatter_tensor(x.relu(), "sum", 4, group_name()))]

    def padded(x):
        parts = [torch.nn.functional.pad(part, (0, 0, 0, 3 - len(part))) for part in x.relu().split([3, 3, 3, 2])]
        return [C10D.wait_tensor(C10D.reduce_scatter_tensor(torch.cat(parts), "sum", 4, group_name()))]

    graphs = [trace(whole, torch.ones(12, 2)), trace(padded, torch.ones(11, 2))]
    assert difference([schedule([gm]) for gm in graphs]) is None
    named(graphs[1], "aten.relu")[0].target = torch.ops.aten.sigmoid.default
    assert "sum over dp_shard(4) of aten.sigmoid as collective 1" in difference([schedule([gm]) for gm in graphs])[2]


@pytest.mark.integration
def test_a_rank_that_computes_a_gradient_otherwise_is_told():
    joint = capture(key_biased()).graph
    swapped = clone(joint)
    output = swapped.graph.output_node()
    names = [gradient_of(desc) for desc in output.meta["desc"]]
    values, q, v = list(output.args[0]), names.index("q.weight"), names.index("v.weight")
    values[q], values[v] = values[v], values[q]
    output.args = (values,)
    was, now = gradient_digests([joint]), gradient_digests([swapped])
    assert len(was) == sum(map(bool, names)) and other_gradient([was, was, was]) is None
    text = "rank 1 computes the gradient of q.weight otherwise than rank 0: the values would be wrong"
    assert other_gradient([was, now, was]) == (1, None, text)
    assert "rank 2 computes the gradient of q.weight" in other_gradient([was, was, was | {"q.weight": ""}])[2]
