"""Small modules of odd kinds: each does one thing that models in the wild do, and that a capture may get wrong.

Each is made from the width of its input and takes float32 tensors of shape (batch, SEQ, DIM), or tokens below VOCAB of
shape (batch, SEQ); what it returns becomes a loss. outcomes.toml says of each what becomes of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

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


def _python_counter(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * m.calls


written("a counter", _counts, steps=lambda: torch.zeros(()))
written("a rebound average", _rebinds, mean=lambda: torch.zeros(DIM))
written("a Python counter", _python_counter, calls=lambda: 0)
written("batch norm", lambda m, x: m.norm(x.flatten(0, 1)), norm=lambda: nn.BatchNorm1d(DIM))
written("layer norm", lambda m, x: m.norm(x), norm=lambda: nn.LayerNorm(DIM))


# parameters

written("spectral norm", lambda m, x: m.head(x), head=lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)))
written("a weight read transposed", lambda m, x: x @ m.layer.weight.t() @ m.layer.weight)
written("a scalar parameter", lambda m, x: x * m.scale, scale=lambda: nn.Parameter(torch.ones(())))
written("a frozen parameter", lambda m, x: x * m.scale,
        scale=lambda: nn.Parameter(torch.full((DIM,), 2.0), requires_grad=False))
written("an unused parameter", lambda m, x: x, idle=lambda: nn.Parameter(torch.ones(DIM)))
written("a complex parameter", lambda m, x: (x * m.phase).abs(),
        phase=lambda: nn.Parameter(torch.ones(DIM, dtype=torch.complex64)))


@odd("tied embeddings", tokens=True)
class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


# control flow and containers

written("a branch on a value", lambda m, x: x if bool(x.sum() > 0) else -x)
written("nested containers", lambda m, x: m.tree["left"][0](x) + m.tree["right"][1](x), tree=lambda: nn.ModuleDict({
    "left": nn.ModuleList([nn.Linear(DIM, DIM)]), "right": nn.Sequential(nn.Identity(), nn.Linear(DIM, DIM))}))


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
written("a chain in place", lambda m, x: x.mul(2).add_(1).mul_(0.5).sigmoid_())


@odd("a hook on a module")
def hooked() -> nn.Module:
    module = Written(lambda m, x: m.head(x), head=nn.Linear(DIM, DIM))
    module.head.register_forward_hook(lambda m, given, out: out * 2)
    module.head.register_forward_pre_hook(lambda m, given: (given[0] + 1,))
    return module


# layers of torch

written("dropout", lambda m, x: F.dropout(x, 0.5, m.training))
written("attention", lambda m, x: m.attend(x, x, x, need_weights=False)[0],
        attend=lambda: nn.MultiheadAttention(DIM, 2, batch_first=True))
written("an LSTM", lambda m, x: m.recur(x)[0], recur=lambda: nn.LSTM(DIM, DIM, batch_first=True))


class Looked(nn.Module):
    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = embed, nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


odd("renormed embeddings", tokens=True)(lambda: Looked(nn.Embedding(VOCAB, DIM, max_norm=1.0)))
odd("sparse embeddings", tokens=True)(lambda: Looked(nn.Embedding(VOCAB, DIM, sparse=True)))
