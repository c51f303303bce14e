"""The verdict on authoring: a plan that gives wrong gradients fails, though every pass keeps them."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from workbench import ParallelPlan, author, author_module, capture, current_world, load_recipe, partition
from workbench.checks.authoring import check_authoring
from workbench.graph.facts import Known
from workbench.pipeline.proofs import authoring_proof
from workbench.pipeline.proofs.authoring_proof import check_replicas, prove_authoring

pytestmark = pytest.mark.ranks

HEADS, DIM = 4, 32
PLAN = ParallelPlan({"wq": "colwise", "wo": {"style": "rowwise", "output": "replicate"}})


class Attention(nn.Module):
    """Heads that are scaled by one weight of a head's size, as a norm of queries is."""

    def __init__(self, normed: bool = True, dropout: float = 0.0, mean_of_heads: bool = False,
                 rate: float = 0.0, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.wo = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.q_norm = nn.Parameter(torch.ones(DIM // HEADS)) if normed else None
        self.dropout, self.mean_of_heads, self.rate = nn.Dropout(dropout), mean_of_heads, rate
        self.register_buffer("mean", torch.zeros(DIM) if counts else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is not None:
            self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
            x = x - self.mean
        heads = self.wq(x).unflatten(-1, (-1, DIM // HEADS))
        if self.q_norm is not None:
            heads = heads * self.q_norm
        if self.mean_of_heads:
            heads = heads / heads.shape[-2]
        heads = nn.functional.dropout(heads, self.rate) if self.rate else heads
        return self.wo(self.dropout(heads).tanh().flatten(-2)).square().mean()


def authoring(mesh: dict[str, int], plan: ParallelPlan, **options: object) -> list[tuple[str, str]]:
    """(outcome, message) of the verdicts on an `Attention` of each rank."""
    world = current_world()
    authored = author_module(Attention(**options), world, world.mesh_of(mesh), plan)
    batch = torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(world.rank * ("tp" not in mesh)))
    graphs = partition(capture(authored, batch=(batch,))).graphs
    known = Known(authoring=prove_authoring(authored, (batch,), graphs))
    return [(str(verdict.outcome), verdict.message) for verdict in check_authoring(known)]


def of_unlike_replicas(part: float, device: str) -> bool:
    """Whether replicas that differ by this part of their values are told, on ranks of this kind of device."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = torch.full((4,), 1 + part * current_world().rank)
    gradient = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    with mock.patch.object(DeviceMesh, "device_type", device):
        return authoring_proof._of_replicas(gradient, "w", "tp") != ""


def of_little_memory_on_rank_1(*args: object) -> list[tuple[str, str]]:
    free = 0 if current_world().rank == 1 else 1 << 60
    with mock.patch.object(authoring_proof, "_free_bytes", lambda _: free):
        return authoring(*args)


@pytest.mark.parametrize(("part", "device", "told"), [
    (1e-6, "cpu", True), (1e-6, "cuda", False), (1e-2, "cuda", True)])
def test_replicas_are_equal_bitwise_on_a_cpu_and_within_a_bound_on_gpus(part, device, told, pool2):
    assert pool2.run(of_unlike_replicas, part, device) == [False, told]


def test_where_one_rank_lacks_memory_all_skip_together(pool2):
    for ((outcome, message),) in pool2.run(of_little_memory_on_rank_1, {"dp_shard": 2}, ParallelPlan()):
        assert outcome == "UNKNOWN" and message.endswith("bytes, is more than the 0 that are free")


def one(pool, *args, **options) -> tuple[str, str]:
    ranks = pool.run(authoring, *args, **options)
    assert ranks[0] == ranks[1]
    (verdict,) = ranks[0]
    return verdict


def test_a_norm_that_the_plan_leaves_out_of_local_heads_fails(pool2):
    """Its gradient on each rank was that of the rank's own heads, and every other verdict PASS."""
    outcome, message = one(pool2, {"tp": 2}, PLAN)
    assert outcome == "FAIL"
    assert message.startswith("gradient of q_norm: its replicas on axis tp differ: each rank computes a part of it")


def of_a_step_that_keeps_its_gradients() -> tuple[str, ...]:
    world = current_world()
    authored = author_module(Attention(), world, world.mesh_of({"tp": 2}), PLAN)
    optimizer = torch.optim.AdamW(authored.module.parameters())
    authored.module(torch.randn(2, 6, DIM, generator=torch.Generator().manual_seed(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    return check_replicas(authored, optimizer).problems


def test_the_means_of_a_step_that_keeps_its_gradients_are_compared(pool2):
    for (problem,) in pool2.run(of_a_step_that_keeps_its_gradients):
        assert problem.startswith("gradient of q_norm: its replicas on axis tp differ")


def test_a_module_that_counts_local_heads_fails_against_the_plain_one(pool2):
    outcome, message = one(pool2, {"tp": 2}, PLAN, normed=False, mean_of_heads=True)
    assert outcome == "FAIL" and message.startswith("the loss is ")


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_a_right_plan_passes_on_every_axis(pool2, mesh):
    outcome, message = one(pool2, mesh, PLAN if "tp" in mesh else ParallelPlan(), normed="tp" not in mesh)
    assert outcome == "PASS" and message.startswith("loss and gradients as the plain module's on all batches; ")


def test_what_cannot_be_compared_is_unknown_with_its_reason(pool2):
    outcome, message = one(pool2, {"tp": 2}, PLAN, normed=False, dropout=0.5)
    assert outcome == "UNKNOWN" and message.endswith("module dropout draws random numbers")
    outcome, message = one(pool2, {"tp": 2}, PLAN, normed=False, rate=0.5)  # of no module of torch's
    assert outcome == "UNKNOWN" and message.endswith("draws random numbers")


def test_a_buffer_that_the_forward_writes_is_unknown(pool2):
    """Each rank's buffer has seen its own batch, and the plain module's all of them: the loss was said to be wrong."""
    outcome, message = one(pool2, {"dp_shard": 2}, ParallelPlan(), normed=False, counts=True)
    assert outcome == "UNKNOWN" and "buffer mean is written" in message


def of_experts(recipe) -> list[str]:
    authored = author(recipe, current_world())
    batch = authored.microbatch()
    facts = prove_authoring(authored, batch, partition(capture(authored, batch=batch)).graphs)
    return [str(verdict.outcome) for verdict in check_authoring(Known(authoring=facts))]


def as_of_experts(*args: object, **options: object) -> list[tuple[str, str]]:
    with mock.patch.object(authoring_proof, "routed_layers", lambda _: {"moe": None}):
        return authoring(*args, **options)


def test_experts_are_compared_and_unknown_where_they_differ(pool2):
    """Experts write their counts to a buffer, and these start again with each step: no reason not to compare."""
    recipe = load_recipe("deepseek_v3").override({"model.n_layers": 2, "data.seq_len": 16, "passes": [],
                                                  "joint_passes": [], "mesh": {"dp_shard": 2, "ep": 2}})
    assert pool2.run(of_experts, recipe) == [["PASS"]] * 2
    wrong = pool2.run(as_of_experts, {"tp": 2}, PLAN, normed=False, mean_of_heads=True)
    for ((outcome, message),) in wrong:
        assert outcome == "UNKNOWN" and "drop tokens, otherwise than on one rank: the loss is " in message


def test_an_axis_over_which_nothing_is_cut_is_told(pool2):
    (idle, proved), _ = pool2.run(authoring, {"tp": 2}, ParallelPlan())
    assert idle == ("NO_EFFECT", "the plan cuts no parameter over the axis tp: its ranks hold and compute the same")
    assert proved[0] == "PASS"
