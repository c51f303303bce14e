"""Passes on one llama3 of two layers: activation_checkpointing, reshard_after_forward and both bucketings."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import FSDP_TP, calls, small
from unknown_draws import ADD_NOISE, NOISE, Noisy, drew_again

from workbench import Outcome, PassSpec, World, capture, compile_step, facts_of, partition
from workbench.authoring.author import author, author_module
from workbench.errors import WorkbenchError
from workbench.graph.gather_chains import gather_chains
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.memory import parameter_gathers
from workbench.graph.read.nodes import module_path
from workbench.passes import transformer_block_bucketing
from workbench.passes.activation_checkpointing import checkpoint_rule
from workbench.pipeline.run_passes import run_joint, saved_bytes
from workbench.recipe.contracts import CONTRACTS
from workbench.torch_api.ops import group_ranks

pytestmark = pytest.mark.integration

ALONE = World("gloo", 1, 0, torch.device("cpu"))
CHECKPOINTING, RESHARD = "activation_checkpointing", "reshard_after_forward"
BLOCKS = "transformer_block_bucketing"


def spec(name, **options):
    return PassSpec(name=name, options=options)


@pytest.fixture(scope="module")
def model(fake4):
    """llama3 on dp_shard 2 x tp 2, without values."""
    return author(small(FSDP_TP, layers=2), fake4)


class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).relu().sum()


def test_a_model_without_layers_and_without_gathers_has_its_reasons(fake4):
    with fake4.fake_mode:
        x = torch.empty(4, 8)
    with capture(author_module(Flat(8, 8), fake4, None, batch=lambda: (x,))) as joint:
        effects = [record.verdict("effect").message for record in run_joint(joint, [CHECKPOINTING, RESHARD])]
    assert effects == ["no module path has a number, as blocks.0", "no parameter is gathered in this graph"]


# activation_checkpointing: what is saved and what is recomputed, by each policy and by a user's rule


@pytest.fixture(scope="module")
def policies(model, through):
    listed = {"none": {"policy": "none"}, "selective": {}, "full": {"policy": "full"},
              "by operator": {"save": ("silu",), "every_nth_matmul": 1}}
    return {name: through(model, [spec(CHECKPOINTING, **options)]) for name, options in listed.items()}


def matmuls_again(found):
    return found[0][CHECKPOINTING].verdict("effect").evidence["recomputed_matmuls"]


def test_how_much_is_saved_and_how_many_matmuls_the_backward_repeats(policies):
    """Seven products a layer. The last of a layer is never needed again, nor is what follows the last saved one."""
    none, selective, full = (saved_bytes(policies[policy][1]) for policy in ("none", "selective", "full"))
    assert none > selective > full > 0
    assert policies["none"][0][CHECKPOINTING].outcome is Outcome.NO_EFFECT
    assert matmuls_again(policies["by operator"]) == 0
    assert 10 <= matmuls_again(policies["full"]) <= 14
    assert 0 < matmuls_again(policies["selective"]) < matmuls_again(policies["full"])
    assert {len(calls(pair.forward, "aten.mm")) for _, pair, _ in policies.values()} == {2 * 7 + 1}
    assert [len(calls(policies[p][1].backward, "aten.silu")) for p in ("full", "by operator")] == [2, 0]


def test_an_operator_that_no_layer_has_is_refused(model, through):
    with pytest.raises(WorkbenchError) as caught:
        through(model, [spec(CHECKPOINTING, save=("silu", "conv2d"))])
    assert "save names ['conv2d'], which no layer holds; a layer has " in str(caught.value)


def test_nothing_is_tagged_outside_the_layers(policies):
    _, _, joint = policies["full"]
    tagged = [n for n in joint.graph.nodes if "recompute" in n.meta]
    assert tagged and {n.meta["ac_graph_id"] for n in tagged} == {0, 1}
    assert not any(n.meta.get("partitioner_tag") == "is_backward" for n in tagged)
    loss = [n for n in joint.graph.nodes if "log_softmax" in n.name]
    assert loss and not any("recompute" in n.meta for n in loss)


def test_a_rule_of_ones_own(model, policies, through):
    name = "first_layer_only"

    @checkpoint_rule(name)
    def in_layer_0(node):
        """layer 0 is recomputed, layer 1 saved"""
        return not module_path(node).startswith("layers.0")

    records, pair, _ = through(model, [name])
    assert records[name].outcome is Outcome.PASS
    assert CONTRACTS[name].changes == "layer 0 is recomputed, layer 1 saved"
    assert 0 < records[name].verdict("effect").evidence["recomputed_matmuls"] < matmuls_again(policies["full"])
    assert saved_bytes(policies["full"][1]) < saved_bytes(pair)


@pytest.mark.parametrize(("name", "options", "operator"), [
    (CHECKPOINTING, {"policy": "full"}, NOISE), ("all_again", {}, ADD_NOISE)])
def test_an_operator_of_an_unknown_library_is_recomputed_only_if_it_is_listed(name, options, operator):
    """It draws random numbers, and has no tag that says so."""
    checkpoint_rule("all_again")(lambda node: False)
    said = f"{operator} may draw random numbers, so the results are saved: list in recomputable what draws none"
    for listed in ((), (operator,)):
        module, batch = Noisy(in_place=operator == ADD_NOISE), (torch.rand(16, 8),)
        joint = capture(author_module(module, ALONE, None, batch=lambda batch=batch: batch))
        (record,) = run_joint(joint, [spec(name, **options, recomputable=listed)])
        again = drew_again(module, compile_step(partition(joint))(*batch))
        assert again is bool(listed) and (said in record.verdict("effect").message) is not again


# reshard_after_forward: gathered weights are freed, through any chain of views, or kept


def test_always_gathers_again_and_frees_and_never_gathers_nothing_again(model, through):
    records, pair, joint = through(model, [RESHARD])
    parameters = len(list(gather_chains(joint)))
    assert parameters == 2 * 9 + 3
    found = records[RESHARD].verdict("effect")
    assert found.outcome is Outcome.PASS and found.evidence["saved_gathered_parameters"] == []
    # the embedding's rows are read and not multiplied: its gradient needs no weight
    assert len(parameter_gathers(pair.backward)) == found.evidence["gathers_in_backward"] == parameters - 1
    records, never, _ = through(model, [CHECKPOINTING, spec(RESHARD, policy="never")])
    assert {r.outcome for r in records.values()} == {Outcome.PASS} and parameter_gathers(never.backward) == []
    records, always, _ = through(model, [CHECKPOINTING, RESHARD])
    assert {r.outcome for r in records.values()} == {Outcome.PASS} and saved_bytes(never) > saved_bytes(always)


# bucketing: fewer launches, the same bytes, gathers on a process group of their own


@pytest.fixture(scope="module")
def buckets(model, through):
    return {name: through(model, [RESHARD], passes) for name, passes in (("plain", ()), (BLOCKS, [BLOCKS]))}


def moved(pair, kind):
    """(launches, bytes, groups) of FSDP's collectives of a kind."""
    found = [c for gm in pair.graphs for c in list_collectives(gm) if c.kind == kind and c.axis == "dp_shard"]
    return len(found), sum(c.payload for c in found), {c.group for c in found}


def test_fewer_launches_and_the_same_bytes(buckets):
    records, pair, _ = buckets[BLOCKS]
    assert records[BLOCKS].outcome is Outcome.PASS
    for kind in ("all_gather", "reduce_scatter"):
        was, now = moved(buckets["plain"][1], kind), moved(pair, kind)
        assert now[0] < was[0] and now[1] == was[1] > 0
    # embedding, two layers, norm and output; the embedding is not gathered again
    assert moved(pair, "all_gather")[0] == 4 + 3
    assert moved(pair, "reduce_scatter")[0] == 4


def test_gathers_have_a_group_of_their_own(model, buckets, through):
    _, pair, _ = buckets[BLOCKS]
    (gather,), (scatter,) = moved(pair, "all_gather")[2], moved(pair, "reduce_scatter")[2]
    assert gather != scatter and group_ranks(gather) == group_ranks(scatter)
    facts = facts_of(pair.forward)
    assert facts.groups["dp_shard.gather"] == gather and facts.group_sizes[gather] == 2
    before = dist.distributed_c10d._world.group_count
    _, shared, _ = through(model, (), [spec(BLOCKS, separate_gather_group=False)])  # leaves nothing to overlap
    assert moved(shared, "all_gather")[2] == moved(shared, "reduce_scatter")[2]
    _, again, _ = through(model, (), [BLOCKS])  # a group has one twin, however often it is built on
    assert moved(again, "all_gather")[2] == {gather} and dist.distributed_c10d._world.group_count == before


PLANS = [
    (("blocks.0", "blocks.1"), Outcome.NO_EFFECT, "no module path matches the buckets ['blocks.0', 'blocks.1']: the"),
    (("layers.0", "blocks.1", ("norm", "output")), Outcome.PASS,
     "no module path matches blocks.1; 10 of 21 gathers of the forward are in no bucket, the first in tok_embeddings")]


def test_a_plan_says_what_it_left_out(model, through):
    for plan, outcome, message in PLANS:
        verdict = through(model, (), [spec(BLOCKS, buckets=plan)])[0][BLOCKS].verdict("effect")
        assert verdict.outcome is outcome and verdict.message.startswith(message)


def test_a_module_in_two_buckets_is_refused_and_a_name_that_begins_alike_is_another(model, through):
    with pytest.raises(WorkbenchError, match="a module is in one bucket"):
        through(model, (), [spec(BLOCKS, buckets=(("layers.0.attention", "layers.0"),))])
    for plan in ([["layers.0"], ["layers.0.attention"]], [["norm"], ["norm"]]):
        with pytest.raises(WorkbenchError, match="a module is in one bucket"):
            transformer_block_bucketing._refuse_overlap(plan)
    transformer_block_bucketing._refuse_overlap([["layers.1"], ["layers.10"]])
