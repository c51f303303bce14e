"""What has to work on every supported torch: `make test-fast TORCH=...` runs these, and keeps the table of results."""

import pytest
import torch
from on_ranks import FSDP4, FSDP_TP, full_level, small, trajectory

from workbench import Outcome, World, build, capture, compile_step, fake_world, partition
from workbench.authoring.author import author_module
from workbench.graph.read.cost import step_flop
from workbench.pipeline.proofs.numerics_proof import prove_numerics

pytestmark = [pytest.mark.compat, pytest.mark.nightly]  # the other tests of passes cover them on the tested torch
DECOMPOSE, AC, RESHARD = "inductor_decomposition", "activation_checkpointing", "reshard_after_forward"
BLOCKS, AUTO, FULL = "transformer_block_bucketing", "autobucketing_reordering", "full_inductor_compilation"
OVERLAP, CLEANUP, REGIONAL = "overlap_collectives", "graph_cleanup", "regional_inductor"
TOUR = small(FSDP4, (DECOMPOSE, AC, RESHARD), (BLOCKS,))
EXPERTS = {"model.family": "deepseek_v3", "model.n_layers": 2, "mesh.ep": 2}
FLEX = {"model.attention": "flex", "model.mask": "document", "model.document_token": 10}


@pytest.mark.parametrize("listed", [
    {"name": DECOMPOSE, "at": "capture"}, {"name": AC, "policy": "full"}, {"name": RESHARD, "policy": "never"},
], ids=lambda listed: listed["name"])
def test_an_option_on_a_fake_mesh_of_8(listed):
    with fake_world(8) as world:
        built = build(small({"dp_shard": 4, "tp": 2}, (listed,)), world)
    assert [record.outcome for record in built.records if record.outcome is not Outcome.PASS] == []
    assert built.saved_bytes and step_flop(built.captured, 1)


class Frozen(torch.nn.Module):
    """A forward that counts its calls in Python, which a capture fixes."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(4)), [0]

    def forward(self, x):
        self.calls[0] += 1
        return (x * self.weight * self.calls[0]).sum()


class OwnWord(Frozen):
    def forward(module, x):
        return super().forward(x)


class Wrapped(Frozen):
    forward = torch.autocast("cpu", enabled=False)(Frozen.forward)  # Dynamo calls its self args[0]


@pytest.mark.parametrize("kind", [Frozen, OwnWord, Wrapped])
def test_what_a_capture_fixes_shows_in_the_second_step(kind):
    world = World("gloo", 1, 0, torch.device("cpu"))
    authored = author_module(kind(), world, None, batch=lambda: (torch.ones(4),))
    (verdict,) = prove_numerics([], compile_step(partition(capture(authored))))
    assert "attribute 'calls', which the forward changes: was '[1]' and is '[0]'" in verdict.message


@pytest.mark.parametrize(("pool", "recipe", "bound"), [
    pytest.param("pool4", small(FSDP4, (), (AUTO,)), 0, id=AUTO),
    pytest.param("pool4", small(FSDP4, (), (BLOCKS, OVERLAP)), 0, id=OVERLAP),
    pytest.param("pool4", small(FSDP_TP, (), (BLOCKS, CLEANUP)), 0, id=CLEANUP),
    pytest.param("pool4", TOUR.override({"mesh.dp_shard": 2, "mesh.tp": 2}), 1e-3, id="the tour's"),
    pytest.param("pool4", small(FSDP_TP, (), (BLOCKS,)).override(EXPERTS), 0, id="dropless experts"),
    pytest.param("pool4", small(FSDP_TP, (), (AUTO,)).override({**EXPERTS, "model.dispatch": "capacity"}), 0,
                 id="experts with a capacity"),
    pytest.param("pool4", small(FSDP_TP, (AC, RESHARD), (BLOCKS,)).override(FLEX), 0, id="flex attention"),
    pytest.param("pool4", small(FSDP_TP, (RESHARD,), (BLOCKS, REGIONAL)), 1e-3, id=REGIONAL),
    pytest.param("pool2", small({"dp_shard": 2}, (DECOMPOSE, RESHARD), (BLOCKS, FULL)), 1e-3, id=FULL),
], indirect=["pool"])
def test_five_steps_on_ranks(pool, recipe, bound):
    for found in pool.run(trajectory, recipe):
        wanted = dict.fromkeys(found["outcomes"], "PASS")
        if OVERLAP in wanted:  # its buckets start as early as they can
            wanted[OVERLAP] = "NO_EFFECT"
        assert found["outcomes"] == wanted and found["schedule"] == "PASS"
        assert found["relative"] < bound or found["differing"] == []
        assert found["routed"][0] == found["routed"][1]


@pytest.mark.ranks
def test_every_verdict_at_level_full(pool4):
    for records, pipeline in pool4.run(full_level, TOUR):
        assert all(outcome == "PASS" for verdicts in records.values() for outcome, _ in verdicts.values()), records
        assert pipeline == ["PASS"]
