"""Small models under FSDP2, and their training, for the tests of `adopt`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from workbench.authoring import simple_fsdp
from workbench.authoring.adopt import AdoptedUnit, UnitGather, adopt, adopted
from workbench.authoring.authored import Authored

VOCABULARY, DIM = 61, 24
BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
BF16_LOGITS = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 6)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Adapted(nn.Linear):
    """A frozen linear layer, and a trained product of rank 2 beside it, as LoRA has."""

    def __init__(self) -> None:
        super().__init__(DIM, 2 * DIM, bias=False)
        self.weight.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(shape) * 0.1) for shape in ((2, DIM), (2 * DIM, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


class Block(nn.Module):
    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.up = Adapted() if adapted else nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.full((DIM,), 0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x)) * self.scale
        return x + self.down(F.gelu(self.up(x)))


class Tiny(nn.Module):
    """Tokens (batch, seq) -> logits (batch, seq, VOCABULARY)."""

    def __init__(self, layers: int = 1, tied: bool = False, adapted: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block(adapted) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


TP = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
      "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


@dataclass
class Case:
    """mesh: names and sizes of the axes; the one called "model" is for parallelize_module. options, root: of
    `fully_shard`, and of the outer unit's alone. tail: norm and head are one unit.

    columns: the first linear layers are sharded by columns. ignored: parameters that FSDP2 leaves alone. local: the
    gradients of all but the last microbatch are not synchronised.
    """

    mesh: dict[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    root: dict[str, Any] = field(default_factory=dict)
    tail: bool = False
    columns: bool = False
    ignored: tuple[str, ...] = ()
    microbatches: int = 1
    local: bool = False

    def build(self) -> tuple[Any, DeviceMesh]:
        """The model under FSDP2, the same at each call, and the mesh of its data-parallel axes."""
        torch.manual_seed(0)
        model = Tiny(**self.model)
        mesh = init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=tuple(self.mesh))
        if "model" in self.mesh:
            for layer in model.layers:
                parallelize_module(layer, mesh["model"], TP)
        data = mesh[tuple(axis for axis in self.mesh if axis != "model")]
        ignored = {p for name, p in model.named_parameters() if name.endswith(self.ignored)}
        options = {"mesh": data, "ignored_params": ignored, **self.options}
        if self.columns:
            options["shard_placement_fn"] = lambda p: Shard(1) if p.shape == (2 * DIM, DIM) else None
        for unit in (*model.layers, *([[model.norm, model.head]] if self.tail else [])):
            fully_shard(unit, **options)
        return fully_shard(model, **options | self.root), data

    def train(self, model: Any, step: Callable[..., Any], data: DeviceMesh, steps: int = 5) -> dict[str, Any]:
        """The losses, clipped norms and parameters of this rank after some steps of AdamW on data of its own."""
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        place = sum(index * 10**dim for dim, index in enumerate(data.get_coordinate() or ()))
        generator = torch.Generator().manual_seed(place)
        seen: dict[str, Any] = {}
        for number in range(steps * self.microbatches):
            last = (number + 1) % self.microbatches == 0
            if self.local:
                model.set_requires_gradient_sync(last)
            tokens = torch.randint(VOCABULARY, (3, 9), generator=generator)
            loss = F.cross_entropy(step(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            seen[f"loss {number}"] = loss.detach()
            if last:
                if "model" not in self.mesh and not self.ignored:
                    seen[f"norm {number}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
                optimizer.step()
                optimizer.zero_grad()
        parameters = model.state_dict().items()
        return seen | {name: p.to_local().clone() if hasattr(p, "to_local") else p for name, p in parameters}


FAULTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "gradients are summed": lambda: mock.patch.object(simple_fsdp, "Partial", lambda wanted: Partial("sum")),
    "each read gathers": lambda: mock.patch.object(UnitGather, "__call__", simple_fsdp.Gather.__call__),
    "outputs are not cast": lambda: mock.patch.object(AdoptedUnit, "cast_output", lambda unit, module, args, x: x),
}


def differing(case: Case, fault: str = "", compiled: Callable[..., Any] | None = None) -> tuple[list[str], Authored]:
    """What of five steps differs in any bit between FSDP2 and the adopted model, on this rank.

    compiled: (model, Authored) -> what is called in the model's place.
    """
    torch.use_deterministic_algorithms(True)
    theirs, data = case.build()
    expected = case.train(theirs, theirs, data)
    model, data = case.build()
    before = dict(model.named_parameters())
    with FAULTS[fault]():
        assert adopt(model) is model and not isinstance(model, FSDPModule)
        after = dict(model.named_parameters())
        assert before.keys() == after.keys() and all(before[name] is after[name] for name in after)
        authored = adopted(model)
        assert authored is not None and authored.module is model
        found = case.train(model, compiled(model, authored) if compiled else model, data)
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name], expected[name])], authored
