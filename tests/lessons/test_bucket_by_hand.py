"""Lesson 05's own bucketing trains with eager's values, bit for bit."""

import operator

import pytest
from graphs_by_hand import named, shards, trace, two_layers
from on_ranks import small, trajectory, user_pass

from workbench import WorkbenchError
from workbench_lessons.l05_bucket_and_overlap.bucket_by_hand import bucket, bucket_gathers

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
    recipe = small({"dp_shard": 2}, (), ("by_hand",)).override({"strict": False, "training.steps": 1})
    with user_pass("by_hand", function, stage="partitioned", numerics="reduction_order"):
        return trajectory(recipe)


@pytest.mark.ranks
def test_it_trains_as_eager_does_and_a_swapped_part_does_not(pool2):
    for ours, wrong in zip(*(pool2.run(on_a_rank, function) for function in (by_hand, swapped)), strict=True):
        assert ours["differing"] == [] and ours["outcomes"] == {"by_hand": "PASS"}
        assert wrong["differing"]


def test_one_bucket_takes_one_dtype(fake4):
    a, b, x = shards(4)
    gm = trace(two_layers, a, b, x)
    gathers = named(gm, "all_gather_into_tensor")
    gathers[1].meta["val"] = gathers[1].meta["val"].double()
    with pytest.raises(WorkbenchError, match="a bucket takes collectives of one group and dtype, not"):
        bucket_gathers(gm, gathers)
