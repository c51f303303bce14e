"""What has to work on every supported torch: `make test-fast TORCH=...` runs these, and keeps the table of results."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import FSDP4, FSDP_TP, full_level, small, trajectory

from workbench import Outcome, RankError, build, capture, compile_step, fake_world, partition
from workbench.authoring.author import author_module
from workbench.graph.read.cost import step_flop
from workbench.pipeline.proofs.numerics_proof import prove_numerics
from workbench.world.mesh import current_world

pytestmark = [pytest.mark.compat, pytest.mark.nightly]  # the other tests of passes cover them on the tested torch
DECOMPOSE, AC, RESHARD = "inductor_decomposition", "activation_checkpointing", "reshard_after_forward"
BLOCKS, AUTO, FULL = "transformer_block_bucketing", "autobucketing_reordering", "full_inductor_compilation"
REGIONAL = "regional_inductor"
NEVER = {"name": RESHARD, "policy": "never"}
AT_CAPTURE = {"name": DECOMPOSE, "at": "capture"}

LISTS = {
    "no pass": ((), ()),
    f"{DECOMPOSE} at capture": ((AT_CAPTURE,), ()),
    f"{AC} full": (({"name": AC, "policy": "full"},), ()),
    f"{RESHARD} never": ((NEVER,), ()),
    AUTO: ((), (AUTO,)),
    "overlap_collectives": ((), (BLOCKS, "overlap_collectives")),
    "graph_cleanup": ((), (BLOCKS, "graph_cleanup")),
    "the tour's": ((DECOMPOSE, AC, RESHARD), (BLOCKS,)),
}
ON_RANKS = [
    *(pytest.param(FSDP4, name, id=f"{name}, dp_shard 4") for name in ("no pass", AUTO, "overlap_collectives")),
    *(pytest.param(FSDP_TP, name, id=f"{name}, dp_shard 2 x tp 2") for name in ("graph_cleanup", "the tour's")),
]


@pytest.mark.parametrize("listed", LISTS)
def test_fake_mesh_of_8(listed):
    with fake_world(8) as world:
        built = build(small({"dp_shard": 4, "tp": 2}, *LISTS[listed]), world)
    assert {r.outcome for r in built.records} <= {Outcome.PASS}
    assert built.saved_bytes and step_flop(built.captured, 1)


class Frozen(torch.nn.Module):
    """A forward that counts its calls in Python, which a capture fixes."""

    def __init__(self):
        super().__init__()
        self.weight, self.calls = torch.nn.Parameter(torch.ones(4)), [0]

    def forward(self, x):
        self.calls[0] += 1
        return (x * self.weight * self.calls[0]).sum()


def proved(module):
    authored = author_module(module, current_world(), None, batch=lambda: (torch.ones(4),))
    return [verdict.message for verdict in prove_numerics([], compile_step(partition(capture(authored))))]


@pytest.mark.ranks
def test_what_a_capture_fixes_shows_in_the_second_step(pool2):
    for (message,) in pool2.run(proved, Frozen()):
        assert "attribute 'calls', which the forward changes: was '[1]' and is '[0]'" in message


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "listed"), ON_RANKS)
def test_five_steps_on_4_ranks(pool4, mesh, listed):
    for found in pool4.run(trajectory, small(mesh, *LISTS[listed])):
        wanted = dict.fromkeys(found["outcomes"], "PASS")
        if listed == "overlap_collectives" and mesh == FSDP4:  # its buckets start as early as they can
            wanted[listed] = "NO_EFFECT"
        assert found["outcomes"] == wanted and found["schedule"] == "PASS"
        assert found["relative"] < 1e-3 if listed == "the tour's" else found["differing"] == []


@pytest.mark.ranks
@pytest.mark.parametrize(("dispatch", "listed"), [("dropless", BLOCKS), ("capacity", AUTO)])
def test_experts_on_4_ranks(pool4, dispatch, listed):
    model = {"model.family": "deepseek_v3", "model.n_layers": 2, "model.dispatch": dispatch, "mesh.ep": 2}
    for found in pool4.run(trajectory, small(FSDP_TP, (), (listed,)).override(model)):
        assert set(found["outcomes"].values()) <= {"PASS"} and found["schedule"] == "PASS"
        assert found["differing"] == [] and found["routed"][0] == found["routed"][1]


@pytest.mark.ranks
def test_every_verdict_at_level_full(pool4):
    for records, pipeline in pool4.run(full_level, small(FSDP4, *LISTS["the tour's"])):
        assert all(outcome == "PASS" for verdicts in records.values() for outcome, _ in verdicts.values()), records
        assert pipeline == ["PASS"]


@pytest.mark.ranks
def test_compiled_regions_on_4_ranks(pool4):
    for found in pool4.run(trajectory, small(FSDP_TP, (RESHARD,), (BLOCKS, REGIONAL))):
        assert found["relative"] < 1e-3 and set(found["outcomes"].values()) == {"PASS"}


@pytest.mark.ranks
def test_flex_attention_on_4_ranks(pool4):
    flex = {"model.attention": "flex", "model.mask": "document", "model.document_token": 10}
    for found in pool4.run(trajectory, small(FSDP_TP, (AC, RESHARD), (BLOCKS,)).override(flex)):
        assert found["differing"] == [] and set(found["outcomes"].values()) == {"PASS"}


@pytest.mark.ranks
def test_full_inductor_on_2_ranks(pool2):
    recipe = small({"dp_shard": 2}, (DECOMPOSE, RESHARD), (BLOCKS, FULL))
    for found in pool2.run(trajectory, recipe):
        assert found["relative"] < 1e-3 and set(found["outcomes"].values()) == {"PASS"}


def raises_on_two():
    if dist.get_rank() == 2:
        raise ValueError("here")
    dist.barrier()


@pytest.mark.ranks
def test_the_pool_names_the_rank_that_fails_and_starts_again(pool4):
    with pytest.raises(RankError, match="rank 2 failed: ValueError: here"):
        pool4.run(raises_on_two)
    assert pool4.run(dist.get_rank) == [0, 1, 2, 3]
