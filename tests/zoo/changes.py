"""Odd modules that ask torch about tensors, modes and the trace, or whose surroundings change between the steps."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, Written, odd, written

# what is asked: whether this is a trace, and what autograd knows of a tensor


def asked(name: str, ask: Callable[[Any, Tensor], Any]) -> None:
    odd(name, traced=True)(lambda: Written(lambda m, x: x * 2 if ask(m, x) else x, mean=torch.ones(DIM)))


asked("is_compiling", lambda m, x: torch.compiler.is_compiling())
asked("deterministic algorithms", lambda m, x: torch.are_deterministic_algorithms_enabled())
asked("is_leaf of a weight", lambda m, x: m.layer.weight.is_leaf)
asked("the grad_fn of an activation", lambda m, x: x.grad_fn is None)
asked("the gradient of an activation", lambda m, x: x.grad is None)
asked("whether a weight is a parameter", lambda m, x: isinstance(m.layer.weight, nn.Parameter))


# what the training loop changes between the steps, and a capture has fixed: the rows of the docs


def changing(name: str, function: Callable[[Any, Tensor], Any], change: Callable[[Any], Any],
             **parts: Callable[[], Any]) -> None:
    """`change` gets the module after each step."""
    odd(name, traced=True, between=change)(
        lambda: Written(function, **{part: make() for part, make in parts.items()}))


class Setting:
    scale = 1.0


def _grow(kept: Any, key: Any) -> None:
    kept[key] = kept[key] + 1


def _global(_: Any) -> None:
    global SCALE
    SCALE += 1


def _closed() -> tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], None]]:
    scale = [1.0]
    return lambda m, x: x * scale[0], lambda m: _grow(scale, 0)


def _environment(_: Any) -> None:
    os.environ["ZOO_SCALE"] = str(1 + float(os.environ["ZOO_SCALE"]))


SCALE = 1.0
os.environ["ZOO_SCALE"] = "1"
changing("a number that is set", lambda m, x: x * m.kept, lambda m: setattr(m, "kept", m.kept + 1), kept=lambda: 1.0)
changing("a list whose item is set", lambda m, x: x * m.kept[0], lambda m: _grow(m.kept, 0), kept=lambda: [1.0])
changing("an object that is another", lambda m, x: x * m.kept.scale,
         lambda m: setattr(m, "kept", SimpleNamespace(scale=2.0)), kept=lambda: SimpleNamespace(scale=1.0))
changing("a function that is another", lambda m, x: m.kept(x), lambda m: setattr(m, "kept", torch.tanh),
         kept=lambda: torch.relu)
changing("a global number that is set", lambda m, x: x * SCALE, _global)
changing("a number of a class that is set", lambda m, x: x * Setting.scale,
         lambda m: setattr(Setting, "scale", Setting.scale + 1))
changing("a list of a closure whose item is set", *_closed())
changing("an environment variable that is set", lambda m, x: x * float(os.environ["ZOO_SCALE"]), _environment)
changing("a hook that comes", lambda m, x: m.head(x),
         lambda m: m.head.register_forward_hook(lambda part, given, out: out * 2), head=lambda: nn.Linear(DIM, DIM))
changing("a module that is another", lambda m, x: m.act(x), lambda m: setattr(m, "act", nn.Tanh()), act=nn.ReLU)
changing("a parameter that is frozen", lambda m, x: m.head(x), lambda m: m.head.requires_grad_(False),
         head=lambda: nn.Linear(DIM, DIM))
changing("a buffer that is another", lambda m, x: x * m.mean, lambda m: setattr(m, "mean", m.mean + 1),
         mean=lambda: torch.ones(DIM))
changing("a buffer that is written", lambda m, x: x * m.mean, lambda m: m.mean.add_(1), mean=lambda: torch.ones(DIM))
changing("what the forward does not read", lambda m, x: x * m.kept[0], lambda m: (
    setattr(m, "other", 1), m.seen.append(1), _grow(m.named, "step")), kept=lambda: [1.0], seen=list,
    named=lambda: {"step": 0})


# generators, and other ways


def _seeded(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand(DIM)


def _forked(m: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x * torch.rand(DIM)


for name, function in {
    "a seed in the forward": _seeded, "a fork of the generator": _forked,
    "the initial seed": lambda m, x: x * (torch.initial_seed() % 7),
    "a tensor that is formatted": lambda m, x: x * len(str(x)),
    "a function's gradient": lambda m, x: torch.func.grad(lambda y: y.pow(3).sum())(x),
    "layers that are dropped at random": lambda m, x: x * (torch.rand(()) < 0.5),
}.items():
    odd(name, traced=True)(lambda function=function: Written(function))
written("a checkpoint that draws again", lambda m, x: checkpoint(
    lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False, preserve_rng_state=False))
written("a checkpoint without a generator that draws nothing", lambda m, x: checkpoint(
    torch.sin, x, use_reentrant=False, preserve_rng_state=False))
