"""Authoring on fake and simulated worlds: what each rank holds, and what is refused. One process, fast."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from workbench import Recipe, WorkbenchError, World, author, author_module, fake_world
from workbench.authoring.plans import AuthoringError, ParallelPlan
from workbench.torch_api.distributed.fake import FakeTensor
from workbench.world.simulated import shards, simulated_world

ALONE = World("gloo", 1, 0, torch.device("cpu"))


def recipe(mesh: dict[str, int], **model: int) -> Recipe:
    return Recipe.model_validate({"name": "test", "model": {"n_layers": 1, **model}, "mesh": mesh,
                                  "data": {"seq_len": 8}})


@pytest.mark.compat
def test_a_fake_world_holds_fake_shards_on_the_whole_mesh():
    with fake_world(8, rank=5) as world:
        authored = author(recipe({"dp_shard": 2, "tp": 4}), world)
        held: dict[str, Any] = dict(authored.module.named_parameters())
        wq = held["layers.0.attention.wq.weight"]
        assert isinstance(wq, DTensor) and isinstance(wq.to_local(), FakeTensor)
        assert tuple(wq.shape) == (128, 128) and tuple(wq.to_local().shape) == (16, 128)
        assert wq.device_mesh.mesh_dim_names == ("dp_shard", "tp")
        assert held["layers.0.attention.wo.weight"].placements == (Shard(0), Shard(1))
        assert held["norm.weight"].placements == (Shard(0), Replicate())
        assert set(authored.groups) == {"dp_shard", "tp"}
        assert authored.buckets == ["tok_embeddings", "layers.0", ["norm", "output"]]


def test_sizes_that_a_world_cannot_share_are_refused():
    refusal = "tp 4 does not divide layers.0.feed_forward.w1.out_features 130"
    with fake_world(8) as world, pytest.raises(WorkbenchError, match=refusal):
        author(recipe({"dp_shard": 2, "tp": 4}, ffn_dim=130), world)
    refusal = "cannot cut dim 0 of tok_embeddings.weight, size 257, into 2 unequal parts: choose a tp that divides it"
    with simulated_world(4) as world, pytest.raises(AuthoringError, match=refusal):  # which torch cannot simulate
        author(recipe({"dp_shard": 2, "tp": 2}, vocab_size=257), world)


class Tied(nn.Module):
    """A user's model: a bias, a buffer, a scalar loss, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.hidden = nn.Linear(6, 6)
        self.unembed = nn.Linear(6, 10, bias=False)
        self.unembed.weight = self.embed.weight
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.unembed(torch.tanh(self.hidden(self.embed(tokens)) * self.scale)).square().mean()


TIED_PLAN = ParallelPlan({"embed": {"style": "rowwise", "input": "replicate", "output": "replicate"},
                          "unembed": {"style": "colwise", "output": "replicate"}},
                         units=("embed", ("hidden", "unembed")))


@pytest.mark.compat
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_any_module_keeps_its_values(sizes):
    torch.manual_seed(0)
    module, tokens = Tied(), torch.arange(10).view(2, 5)
    expected = module(tokens)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    torch.manual_seed(0)
    with simulated_world(4) as world:
        authored = author_module(Tied(), world, world.mesh_of(sizes), TIED_PLAN)
        assert authored.buckets == ["embed", ["hidden", "unembed"]]
        loss = authored.module(tokens)
        loss.backward()
        assert [name for name, _ in authored.module.named_parameters()] == list(gradients)
        losses = shards(loss)
        held: dict[str, Any] = dict(authored.module.named_parameters())
        whole = {name: shards(p.grad.full_tensor())[0] for name, p in held.items()}
    torch.testing.assert_close(losses[3], expected.detach())
    torch.testing.assert_close(whole, gradients)


def test_a_shared_weight_must_be_cut_once():
    plan = ParallelPlan({"embed": {"style": "colwise"}, "unembed": "colwise"})
    refusal = "unembed.weight is embed.weight under another name, and the plan cuts them .*dim 0 here, dim 1 there"
    with fake_world(2) as world, pytest.raises(AuthoringError, match=refusal):
        author_module(Tied(), world, world.mesh_of({"tp": 2}), plan)


def test_what_no_rank_can_hold_is_named():
    with torch.device("meta"):
        module = Tied()
    with pytest.raises(AuthoringError, match=r"buffer 'scale' is on the meta device.*give Tied a method reset_buffers"):
        author_module(module, ALONE, None)
    module = nn.Module()
    module.gain = nn.Parameter(torch.tensor(1.0))
    with fake_world(2) as world:
        with pytest.raises(AuthoringError, match=r"parameter gain has no dim that dp_shard"):
            author_module(module, world, world.mesh_of({"dp_shard": 2}))
        with pytest.raises(AuthoringError, match=r"mesh axis 'cp' is unknown"):
            author_module(nn.Linear(2, 2), world, world.mesh_of({"cp": 2}))
