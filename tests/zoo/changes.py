"""Odd modules that ask torch about tensors, modes and the trace, or whose surroundings change between the steps."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, LINEAR, ONES, head, written

# what is asked: whether this is a trace, and what autograd knows of a tensor


for name, ask in {
    "is_compiling": lambda m, x: torch.compiler.is_compiling(),
    "the grad_fn of an activation": lambda m, x: x.grad_fn is None,
    "the gradient of an activation": lambda m, x: x.grad is None,
    "whether a weight is a parameter": lambda m, x: isinstance(m.layer.weight, nn.Parameter),
}.items():
    written(name, lambda m, x, ask=ask: x * 2 if ask(m, x) else x, traced=True)


# what the training loop changes between the steps: a capture has fixed what is no tensor

for name, function, between, parts in (
    ("a number that is set", lambda m, x: x * m.kept, lambda m: setattr(m, "kept", m.kept + 1), {"kept": lambda: 1.0}),
    ("a hook that comes", head, lambda m: m.head.register_forward_hook(lambda part, given, out: out * 2), LINEAR),
    ("a module that is another", lambda m, x: m.act(x), lambda m: setattr(m, "act", nn.Tanh()), {"act": nn.ReLU}),
    ("a parameter that is frozen", head, lambda m: m.head.requires_grad_(False), LINEAR),
    ("a buffer that is another", lambda m, x: x * m.mean, lambda m: setattr(m, "mean", m.mean + 1), ONES),
    ("a buffer that is written", lambda m, x: x * m.mean, lambda m: m.mean.add_(1), ONES),
    ("what the forward does not read", lambda m, x: x, lambda m: m.seen.append(1), {"seen": list}),
):
    written(name, function, between=between, traced=True, **parts)


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
    written(name, function, traced=True)
written("a checkpoint that draws again", lambda m, x: checkpoint(
    lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False, preserve_rng_state=False))
written("a checkpoint without a generator that draws nothing", lambda m, x: checkpoint(
    torch.sin, x, use_reentrant=False, preserve_rng_state=False))
