"""Lesson 05's own bucketing against torch's: the same launches, and eager's values bit for bit."""

import operator

import pytest
from graphs_by_hand import named, shards, trace, two_layers
from on_ranks import small, trajectory, user_pass

from workbench import WorkbenchError, author, capture, partition, run_partitioned
from workbench.graph.read.collectives import launches, list_collectives
from workbench_lessons.l05_bucket_and_overlap.bucket_by_hand import bucket, bucket_gathers

BLOCKS = "transformer_block_bucketing"
BUCKETS = (("tok_embeddings",), ("layers.0",), ("norm", "output"))


def by_hand(gm):
    for modules in BUCKETS:
        bucket(gm, *modules)
    return gm


def swapped(gm):
    """A fault: two weights of one shape get each other's part."""
    by_hand(gm)
    parts = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    first, second = next((a, b) for a in parts for b in parts
                         if a < b and a.meta["val"].shape == b.meta["val"].shape and a.args[0] is b.args[0])
    first.args, second.args = second.args, first.args
    return gm


def on_a_rank(function):
    recipe = small({"dp_shard": 2}, (), ("by_hand",)).override({"strict": False, "training.steps": 2})
    with user_pass("by_hand", function, stage="partitioned", numerics="reduction_order"):
        return trajectory(recipe)


@pytest.mark.ranks
def test_it_trains_as_eager_does_and_a_swapped_part_does_not(pool2):
    for ours, wrong in zip(*(pool2.run(on_a_rank, function) for function in (by_hand, swapped)), strict=True):
        assert ours["differing"] == [] and ours["outcomes"] == {"by_hand": "PASS"}
        assert wrong["differing"]


@pytest.mark.integration
def test_the_buckets_are_torchs(fake4):
    pair = partition(capture(author(small({"dp_shard": 4}), fake4)))

    def counted(name):
        changed = pair.fork()
        record = run_partitioned(changed, [name])[0][-1]
        assert record.outcome == "PASS", record.verdicts
        sent = [c for graph in changed.graphs for c in list_collectives(graph)]
        return launches(sent), sum(c.payload for c in sent)

    with user_pass("by_hand", by_hand, stage="partitioned", numerics="reduction_order"):
        (ours, our_bytes), (torchs, their_bytes) = counted("by_hand"), counted(BLOCKS)
    assert sorted(ours.values()) == sorted(torchs.values()) == [3, 3] and our_bytes == their_bytes


def test_one_bucket_takes_one_dtype(fake4):
    a, b, x = shards(4)
    gm = trace(two_layers, a, b, x)
    gathers = named(gm, "all_gather_into_tensor")
    gathers[1].meta["val"] = gathers[1].meta["val"].double()
    with pytest.raises(WorkbenchError, match="a bucket takes collectives of one group and dtype, not"):
        bucket_gathers(gm, gathers)
