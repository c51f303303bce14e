import torch
from graphs_by_hand import C10D, DIM, backward_of, gather, group_name, shards, trace

from workbench.graph.read.memory import gathered_parameters_kept, inputs_written, parameter_gathers, saved_tensors

WEIGHT = DIM * DIM * 4


def forward_that_saves(how):
    def forward(shard, x):
        weight = gather(shard)
        return [x @ weight, how(weight), x]

    return trace(forward, shards(4)[0], shards(4)[2])


def gathered(gm):
    """The saved tensors that hold a gathered parameter, or a copy of one."""
    return [row for row in saved_tensors(gm, backward_of(gm)) if row.gathered]


def chain_of_views(weight):
    return weight.view(-1).view(DIM, DIM).t().t()


def test_a_weight_kept_through_four_views_is_found(fake4):
    gm = forward_that_saves(chain_of_views)
    (kept,) = gathered_parameters_kept(gm, backward_of(gm))
    assert len(kept.alias) == 6 and "wait" in kept.alias[4] and "all_gather" in kept.alias[5]
    assert kept.held_bytes == WEIGHT and not kept.copied
    waits = {n for n in gm.graph.nodes if "wait" in n.name}
    assert not waits & set(gm.graph.output_node().args[0]), "the naive test, saved waits, must not see it"
    rows = saved_tensors(gm, backward_of(gm))
    assert [row.held_bytes for row in rows] == [WEIGHT, 0]  # an input that is saved holds nothing more


def test_items_of_split_views_alias_their_weight(fake4):
    gm = forward_that_saves(lambda w: w.split(2)[1])
    (kept,) = gathered_parameters_kept(gm, backward_of(gm))
    assert (kept.bytes, kept.held_bytes) == (WEIGHT // 4, WEIGHT)


def test_copies_have_a_rule_of_their_own(fake4):
    for copy in (torch.clone, lambda w: w.to(torch.float64), lambda w: torch.cat([w, w])):
        gm = forward_that_saves(copy)
        assert gathered_parameters_kept(gm, backward_of(gm)) == []
        (row,) = gathered(gm)
        assert row.copied


def test_activations_gathered_by_tensor_parallelism_are_not_parameters(fake4):
    def forward(shard, x):
        whole = gather(torch.relu(x @ gather(shard)))
        return [whole.sum(), whole]

    gm = trace(forward, shards(4)[0], shards(4)[2])
    assert len(parameter_gathers(gm)) == 1
    assert gathered_parameters_kept(gm, backward_of(gm)) == []
    assert [row.name for row in saved_tensors(gm, backward_of(gm))] == [gm.graph.output_node().all_input_nodes[1].name]


def bucket(values):
    """Gather several values through one buffer that is filled in place, as bucketing does, and copy them out."""
    whole = values[0].new_empty(4 * sum(v.numel() for v in values))
    mine = whole.narrow(0, 0, whole.numel() // 4)
    mine.copy_(torch.cat([v.reshape(-1) for v in values]))
    done = C10D.wait_tensor(C10D.all_gather_into_tensor_out(mine, 4, group_name(), out=whole)).view(4, -1)
    outs = [done.new_empty(4, v.numel()) for v in values]
    torch.ops.aten.split_with_sizes_copy.out(done, [v.numel() for v in values], 1, out=outs)
    return [out.view(-1, DIM) for out in outs]


def test_a_weight_copied_out_of_a_bucket_is_a_copy_and_still_found(fake4):
    def forward(shard_a, shard_b, x):
        a, b = bucket([shard_a, shard_b])
        return [x @ a @ b, a.t(), b]

    gm = trace(forward, *shards(4))
    assert len(parameter_gathers(gm)) == 1
    assert gathered_parameters_kept(gm, backward_of(gm)) == []
    assert len(gathered(gm)) == 2


def test_activations_written_into_a_bucket_are_not_parameters(fake4):
    def forward(shard_a, shard_b, x):
        a, _ = bucket([shard_a + 1.5, shard_b])
        return [x @ a, a]

    gm = trace(forward, *shards(4))
    assert parameter_gathers(gm) == [] == gathered(gm)


def test_of_a_tuple_only_the_items_that_are_saved_are_held(fake4):
    def forward(x):
        out, mean, rstd = torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)
        return [out.sum(), mean, rstd, rstd.view(-1)]

    gm = trace(forward, torch.randn(1024, 8))
    rows = saved_tensors(gm, backward_of(gm))
    assert [row.held_bytes for row in rows] == [4096, 4096, 0]
    assert {row.root for row in rows} == {"native_layer_norm"}


def test_a_write_into_an_input_is_seen_through_views(fake4):
    x = torch.ones(4, 4)
    assert [n.op for n in inputs_written(trace(lambda x: x.view(-1).add_(1), x))] == ["placeholder"]
    assert not inputs_written(trace(lambda x: (x + 1).add_(1), x))
