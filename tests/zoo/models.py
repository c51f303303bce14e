"""Small modules of odd kinds: each does one thing that models in the wild do, and that a capture may get wrong.

Each is made from the width of its input and takes float32 tensors of shape (batch, SEQ, DIM), or tokens below VOCAB of
shape (batch, SEQ); what it returns becomes a loss. outcomes.toml says of each what becomes of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

DIM, SEQ, VOCAB = 8, 4, 16


@dataclass(frozen=True)
class Odd:
    """make: the module. tokens: its input are tokens. slow: never in the daily sample. double: compared in float64,
    where another order of sums does not show. traced: whether make_fx's capture is tried, too. between: called with
    the module after each step."""

    make: Callable[[], nn.Module]
    tokens: bool = False
    slow: bool = False
    double: bool = False
    traced: bool = False
    between: Callable[[Any], Any] | None = None


ZOO: dict[str, Odd] = {}


def odd(name: str, **about: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        ZOO[name] = Odd(make, **about)
        return make

    return add


class Written(nn.Module):
    """A layer, and a function of the module and its output: most of the zoo is made of it."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(DIM, DIM)
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.layer(x))


def written(name: str, function: Callable[[Any, Tensor], Any], **parts: Callable[[], Any]) -> None:
    odd(name)(lambda: Written(function, **{part: make() for part, make in parts.items()}))


# buffers, and what a step writes


def _counts(m: Any, x: Tensor) -> Tensor:
    m.steps.add_(1)
    return x * m.steps


def _rebinds(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean((0, 1))
    return x - m.mean


def _follows_weight(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.bias.lerp_(x.mean((0, 1)), 0.1)
    return x - m.bias


def _python_counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


def _keeps_activation(m: Any, x: Tensor) -> Tensor:
    m.seen = x
    return x * 2


written("a counter", _counts, steps=lambda: torch.zeros(()))
written("a rebound average", _rebinds, mean=lambda: torch.zeros(DIM))
written("a Python counter", _python_counter, calls=lambda: 0)
written("an activation kept for a caller", _keeps_activation)
written("a followed mean", _follows_weight, bias=lambda: torch.zeros(DIM))
written("batch norm", lambda m, x: m.norm(x.flatten(0, 1)), norm=lambda: nn.BatchNorm1d(DIM))
written("layer norm", lambda m, x: m.norm(x), norm=lambda: nn.LayerNorm(DIM))


# parameters

written("spectral norm", lambda m, x: m.head(x), head=lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)))
written("weight norm", lambda m, x: m.head(x), head=lambda: parametrizations.weight_norm(nn.Linear(DIM, DIM)))
written("a weight read transposed", lambda m, x: x @ m.layer.weight.t() @ m.layer.weight)
written("slices of a weight", lambda m, x: torch.cat([x @ m.layer.weight[:4].t(), x @ m.layer.weight[4:].t()], -1))
written("a scalar parameter", lambda m, x: x * m.scale, scale=lambda: nn.Parameter(torch.ones(())))
written("a frozen parameter", lambda m, x: x * m.scale,
        scale=lambda: nn.Parameter(torch.full((DIM,), 2.0), requires_grad=False))
written("an unused parameter", lambda m, x: x, idle=lambda: nn.Parameter(torch.ones(DIM)))
written("a parameter list", lambda m, x: x * m.scales[0] + m.scales[1],
        scales=lambda: nn.ParameterList([torch.ones(DIM), torch.zeros(DIM)]))
written("a complex parameter", lambda m, x: (x * m.phase).abs(),
        phase=lambda: nn.Parameter(torch.ones(DIM, dtype=torch.complex64)))


@odd("tied three times")
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(DIM, DIM) for _ in range(3))
        self.third.weight = self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


@odd("tied embeddings", tokens=True)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


# control flow and containers

written("a branch on shape", lambda m, x: torch.relu(x) if x.shape[1] > 2 else x)
written("a branch on a value", lambda m, x: x if bool(x.sum() > 0) else -x)
written("nested containers", lambda m, x: m.tree["left"][0](x) + m.tree["right"][1](x), tree=lambda: nn.ModuleDict({
    "left": nn.ModuleList([nn.Linear(DIM, DIM)]), "right": nn.Sequential(nn.Identity(), nn.Linear(DIM, DIM))}))


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, *, x: Tensor, scale: float = 1.0, **more: Tensor) -> Any:
        return {"out": self.inner(x) * scale, **more}


written("keywords and a dictionary", lambda m, x: m.given(x=x, scale=0.5, rest=x)["out"], given=Given)


# autograd


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grad  # not the derivative, so that it shows


def _without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean()
    return x / (scale + 1)


written("a custom gradient", lambda m, x: Doubled.apply(x))
written("a part without gradient", _without_gradient)
written("a detached part", lambda m, x: x + x.detach().sin())
written("checkpoint inside", lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
        inner=lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)))
written("a chain in place", lambda m, x: x.mul(2).add_(1).mul_(0.5).sigmoid_())
written("written by index", lambda m, x: torch.zeros_like(x).index_add_(1, torch.tensor([1, 0, 3, 2]), x))


@odd("a hook on a module")
def hooked() -> nn.Module:
    module = Written(lambda m, x: m.head(x), head=nn.Linear(DIM, DIM))
    module.head.register_forward_hook(lambda m, given, out: out * 2)
    module.head.register_forward_pre_hook(lambda m, given: (given[0] + 1,))
    return module


# random numbers

written("dropout", lambda m, x: F.dropout(x, 0.5, m.training))
written("noise", lambda m, x: x + torch.randn_like(x))
written("Python's random numbers", lambda m, x: x * random.Random(0).random())


# layers of torch


written("attention", lambda m, x: m.attend(x, x, x, need_weights=False)[0],
        attend=lambda: nn.MultiheadAttention(DIM, 2, batch_first=True))
written("an LSTM", lambda m, x: m.recur(x)[0], recur=lambda: nn.LSTM(DIM, DIM, batch_first=True))
written("einsum", lambda m, x: torch.einsum("bsd,ed->bse", x, m.layer.weight))


class Looked(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = embed, nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


odd("renormed embeddings", tokens=True)(
    lambda: Looked(nn.Embedding(VOCAB, DIM, max_norm=1.0)))
odd("sparse embeddings", tokens=True)(
    lambda: Looked(nn.Embedding(VOCAB, DIM, sparse=True)))
