"""Small modules of odd kinds: each does one thing that models in the wild do, and that a capture may get wrong.

Each is made from the width of its input and takes float32 tensors of shape (batch, SEQ, DIM), or tokens below VOCAB of
shape (batch, SEQ); what it returns becomes a loss. outcomes.toml says of each what becomes of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

DIM, SEQ, VOCAB = 8, 4, 16


@dataclass(frozen=True)
class Odd:
    """make: the module. tokens: its input are tokens. slow: never in the daily sample. traced: whether make_fx's
    capture is tried, too. between: called with the module after each step."""

    make: Callable[[], nn.Module]
    tokens: bool = False
    slow: bool = False
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


def written(name: str, function: Callable[[Any, Tensor], Any], *, change: Callable[[Any], Any] = lambda m: None,
            traced: bool = False, between: Callable[[Any], Any] | None = None, **parts: Callable[[], Any]) -> None:
    """change: called with the module when it is made. parts: its attributes."""
    def make() -> nn.Module:
        module = Written(function, **{part: make() for part, make in parts.items()})
        change(module)
        return module

    odd(name, traced=traced, between=between)(make)


def head(m: Any, x: Tensor) -> Tensor:
    return m.head(x)


LINEAR = {"head": lambda: nn.Linear(DIM, DIM)}
ONES = {"mean": lambda: torch.ones(DIM)}


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

written("spectral norm", head, head=lambda: parametrizations.spectral_norm(nn.Linear(DIM, DIM)))
written("a weight read transposed", lambda m, x: x @ m.layer.weight.t() @ m.layer.weight)
written("a scalar parameter", lambda m, x: x * m.scale, scale=lambda: nn.Parameter(torch.ones(())))
written("a frozen parameter", lambda m, x: x * m.scale,
        scale=lambda: nn.Parameter(torch.full((DIM,), 2.0), requires_grad=False))
written("an unused parameter", lambda m, x: x, idle=lambda: nn.Parameter(torch.ones(DIM)))
written("a complex parameter", lambda m, x: (x * m.phase).abs(),
        phase=lambda: nn.Parameter(torch.ones(DIM, dtype=torch.complex64)))


@odd("tied embeddings", tokens=True)
def tied() -> nn.Module:
    embed, head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, head)


# autograd


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] * grad  # not the derivative, so that it shows


written("a custom gradient", lambda m, x: Doubled.apply(x))
written("a chain in place", lambda m, x: x.mul(2).add_(1).mul_(0.5).sigmoid_())


# layers of torch

written("attention", lambda m, x: m.attend(x, x, x, need_weights=False)[0],
        attend=lambda: nn.MultiheadAttention(DIM, 2, batch_first=True))
written("an LSTM", lambda m, x: m.recur(x)[0], recur=lambda: nn.LSTM(DIM, DIM, batch_first=True))
for kind, options in {"renormed": {"max_norm": 1.0}, "sparse": {"sparse": True}}.items():
    odd(f"{kind} embeddings", tokens=True)(
        lambda options=options: nn.Sequential(nn.Embedding(VOCAB, DIM, **options), nn.Linear(DIM, DIM)))
