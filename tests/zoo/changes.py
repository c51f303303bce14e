"""Odd modules that ask torch about tensors, modes and the trace, or whose surroundings change between the steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, Written, odd, written

# what is asked: whether this is a trace, and what autograd knows of a tensor


def asked(name: str, ask: Callable[[Any, Tensor], Any]) -> None:
    odd(name, traced=True)(lambda: Written(lambda m, x: x * 2 if ask(m, x) else x))


asked("is_compiling", lambda m, x: torch.compiler.is_compiling())
asked("the grad_fn of an activation", lambda m, x: x.grad_fn is None)
asked("the gradient of an activation", lambda m, x: x.grad is None)
asked("whether a weight is a parameter", lambda m, x: isinstance(m.layer.weight, nn.Parameter))


# what the training loop changes between the steps: a capture has fixed what is no tensor


def changing(name: str, function: Callable[[Any, Tensor], Any], change: Callable[[Any], Any],
             **parts: Callable[[], Any]) -> None:
    """`change` gets the module after each step."""
    odd(name, traced=True, between=change)(
        lambda: Written(function, **{part: make() for part, make in parts.items()}))


LINEAR, ONES = {"head": lambda: nn.Linear(DIM, DIM)}, {"mean": lambda: torch.ones(DIM)}
changing("a number that is set", lambda m, x: x * m.kept, lambda m: setattr(m, "kept", m.kept + 1), kept=lambda: 1.0)
changing("a hook that comes", lambda m, x: m.head(x),
         lambda m: m.head.register_forward_hook(lambda part, given, out: out * 2), **LINEAR)
changing("a module that is another", lambda m, x: m.act(x), lambda m: setattr(m, "act", nn.Tanh()), act=nn.ReLU)
changing("a parameter that is frozen", lambda m, x: m.head(x), lambda m: m.head.requires_grad_(False), **LINEAR)
changing("a buffer that is another", lambda m, x: x * m.mean, lambda m: setattr(m, "mean", m.mean + 1), **ONES)
changing("a buffer that is written", lambda m, x: x * m.mean, lambda m: m.mean.add_(1), **ONES)
changing("what the forward does not read", lambda m, x: x * m.kept[0],
         lambda m: (setattr(m, "other", 1), m.seen.append(1)), kept=lambda: [1.0], seen=list)


# generators, and other ways


def _seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand(DIM)


def _forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x * torch.rand(DIM)


for name, function in {
    "a seed in the forward": _seeded, "a fork of the generator": _forked,
    "a function's gradient": lambda m, x: torch.func.grad(lambda y: y.pow(3).sum())(x),
    "layers that are dropped at random": lambda m, x: x * (torch.rand(()) < 0.5),
}.items():
    odd(name, traced=True)(lambda function=function: Written(function))
written("a checkpoint that draws again", lambda m, x: checkpoint(
    lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False, preserve_rng_state=False))
written("a checkpoint without a generator that draws nothing", lambda m, x: checkpoint(
    torch.sin, x, use_reentrant=False, preserve_rng_state=False))
