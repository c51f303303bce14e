"""Both bucketings: fewer launches, the same bytes, gathers on a process group of their own."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import list_collectives
from workbench.passes import transformer_block_bucketing
from workbench.recipe.sections import PassSpec
from workbench.torch_api.ops import group_ranks

pytestmark = pytest.mark.integration

BLOCKS, AUTO = "transformer_block_bucketing", "autobucketing_reordering"
ONE_GROUP = PassSpec(name=BLOCKS, options={"separate_gather_group": False})


@pytest.fixture(scope="module")
def variants(two_layers, through):
    listed = {"plain": (), "blocks": [BLOCKS], "auto": [AUTO]}
    return {name: through(two_layers, ["reshard_after_forward"], passes) for name, passes in listed.items()}


def moved(pair, kind):
    """(launches, bytes) of FSDP's collectives of a kind."""
    found = [c for gm in pair.graphs for c in list_collectives(gm) if c.kind == kind and c.axis == "dp_shard"]
    return len(found), sum(c.payload for c in found)


@pytest.mark.parametrize("name", [BLOCKS, AUTO])
def test_fewer_launches_and_the_same_bytes(variants, name):
    records, pair, _ = variants["blocks" if name == BLOCKS else "auto"]
    record = records[name]
    assert record.outcome is Outcome.PASS
    for kind in ("all_gather", "reduce_scatter"):
        was, now = moved(variants["plain"][1], kind), moved(pair, kind)
        few_enough = name == AUTO and kind == "reduce_scatter"  # all of them are hidden as they are
        assert (now[0] < was[0] or few_enough) and now[1] == was[1] > 0
    if name == BLOCKS:  # embedding, two layers, norm and output; the embedding is not gathered again
        assert moved(pair, "all_gather")[0] == 4 + 3
        assert moved(pair, "reduce_scatter")[0] == 4


def groups_of(pair, kind):
    return {c.group for gm in pair.graphs for c in list_collectives(gm) if c.kind == kind and c.axis == "dp_shard"}


def test_gathers_have_a_group_of_their_own(variants, two_layers, through):
    _, pair, _ = variants["blocks"]
    gathers, scatters = groups_of(pair, "all_gather"), groups_of(pair, "reduce_scatter")
    assert len(gathers) == len(scatters) == 1 and not gathers & scatters
    (gather,), (scatter,) = gathers, scatters
    assert group_ranks(gather) == group_ranks(scatter)
    facts = facts_of(pair.forward)
    assert facts.groups["dp_shard.gather"] == gather and facts.group_sizes[gather] == 2
    before = dist.distributed_c10d._world.group_count
    _, shared, _ = through(two_layers, (), [ONE_GROUP])  # the naive version, which leaves nothing to overlap
    assert groups_of(shared, "all_gather") == groups_of(shared, "reduce_scatter")
    _, again, _ = through(two_layers, (), [BLOCKS])  # a group has one twin, however often it is built on
    assert groups_of(again, "all_gather") == gathers and dist.distributed_c10d._world.group_count == before


PLANS = [
    (("blocks.0", "blocks.1"), Outcome.NO_EFFECT, "no module path matches the buckets ['blocks.0', 'blocks.1']: the"),
    (("layers.0", "blocks.1", ("norm", "output")), Outcome.PASS,
     "no module path matches blocks.1; 10 of 21 gathers of the forward are in no bucket, the first in tok_embeddings")]


def test_a_plan_says_what_it_left_out(two_layers, through):
    for plan, outcome, message in PLANS:
        records, _, _ = through(two_layers, (), [PassSpec(name=BLOCKS, options={"buckets": plan})])
        verdict = records[BLOCKS].verdict("effect")
        assert verdict.outcome is outcome and verdict.message.startswith(message)


def test_a_module_in_two_buckets_is_refused_and_a_name_that_begins_alike_is_another(two_layers, through):
    with pytest.raises(WorkbenchError, match="a module is in one bucket"):
        through(two_layers, (), [PassSpec(name=BLOCKS, options={"buckets": (("layers.0.attention", "layers.0"),)})])
    for plan in ([["layers.0"], ["layers.0.attention"]], [["norm"], ["norm"]]):
        with pytest.raises(WorkbenchError, match="a module is in one bucket"):
            transformer_block_bucketing._refuse_overlap(plan)
    transformer_block_bucketing._refuse_overlap([["layers.1"], ["layers.10"]])
