"""Odd modules that keep something between their steps, in Python or in buffers, and share, hook or write it; that draw
numbers or ask about values; odd ways through autograd.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, LINEAR, ONES, head, odd, written

# what is kept from step to step


def _closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def function(m: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return function


def _of_weight(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.calls = getattr(m.layer.weight, "calls", 0) + 1
    return x * m.layer.weight.calls


def _average_of_a_weight(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.shadow.lerp_(m.layer.weight, 0.1)
    return x + x @ m.shadow


def _last(m: Any, x: Tensor) -> Tensor:
    found = x if m.seen is None else x + m.seen
    m.seen = x.detach()
    return found


def _registered_late(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("late", x.detach().mean((0, 1)))
    return x - m.late


def _swapped(m: Any, x: Tensor) -> Tensor:
    found = x * m.mean
    m.mean, m.other = m.other, m.mean
    return found


def _written_in_a_checkpoint(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda y: y.sin() * m.mean.add_(1), x, use_reentrant=False)


def _times_a_counter(m: Any, x: Tensor) -> Tensor:
    found = x * m.steps.item()
    m.steps.add_(1)
    return found


written("a number of a closure", _closure())
written("a number of a weight", _of_weight)
written("a branch on the last gradient", lambda m, x: x if m.layer.weight.grad is None else -x)
written("the version of a weight", lambda m, x: x * m.layer.weight._version)
written("a moving average of a weight", _average_of_a_weight, shadow=lambda: torch.zeros(DIM, DIM))
written("the last step's activation", _last, seen=lambda: None)
written("a buffer of the forward", _registered_late)
written("buffers that change places", _swapped, **ONES, other=lambda: torch.zeros(DIM))
written("a buffer written in a checkpoint", _written_in_a_checkpoint, **ONES)
written("a product with an item", _times_a_counter, steps=lambda: torch.ones((), dtype=torch.int64))
written("a tensor that is no buffer", lambda m, x: x * m.state.add_(1),
        change=lambda m: object.__setattr__(m, "state", torch.zeros(())))
written("a buffer that is not saved", lambda m, x: x * m.scale,
        change=lambda m: m.register_buffer("scale", torch.full((DIM,), 0.5), persistent=False))


# numbers that are drawn, and values that are asked about

written("a number of uniform", lambda m, x: x * random.uniform(0, 1))
written("a number of choice", lambda m, x: x * random.choice([1, 2]))
written("a loop over an item", lambda m, x: sum([x for _ in range(m.size.item())], x),
        size=lambda: torch.ones((), dtype=torch.int64))
written("a number read from a tensor", lambda m, x: x * float(x.mean()))
written("rows chosen by value", lambda m, x: x[x > 0])
written("a branch by torch.cond", lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))


# shared memory, hooks and writes


def _halves(m: Any) -> None:
    both = torch.linspace(-1, 1, 2 * DIM)
    m.left, m.right = nn.Parameter(both[:DIM]), nn.Parameter(both[DIM:])


def _hooked(m: Any) -> None:
    m.head.register_forward_hook(lambda part, inputs, out: out * 2)
    m.head.register_forward_pre_hook(lambda part, inputs: (inputs[0] + 1,))


def _hooked_tensor(m: Any, x: Tensor) -> Tensor:
    found = x * 1
    found.register_hook(lambda grad: grad * 3)
    return found


def _decayed(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data.mul_(0.9)
    return m.layer(x)


written("parameters that are views of one tensor", lambda m, x: x * m.left + m.right, change=_halves)
written("a buffer in a parameter's memory", lambda m, x: m.layer(x) @ m.same,
        change=lambda m: m.register_buffer("same", m.layer.weight.data))
written("two buffers in one memory", lambda m, x: m.one.add_(1) * 0 + x * m.two,
        change=lambda m: m.register_buffer("two", m.one), one=lambda: torch.zeros(()))
for name, change in {
    "a hook on a module": _hooked,
    "a hook on a module's gradient": lambda m: m.head.register_full_backward_hook(
        lambda part, inner, outer: (inner[0] * 2,)),
    "a hook on a parameter": lambda m: m.head.weight.register_hook(lambda grad: grad * 2),
    "a hook after a parameter's gradient": lambda m: m.head.weight.register_post_accumulate_grad_hook(lambda p: None),
}.items():
    written(name, head, change=change, **LINEAR)
written("a hook on a tensor", _hooked_tensor)
written("a weight decayed by its data", _decayed)
odd("an input written in place")(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM)))


# autograd


def _gradient_inside(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad((x ** 3).sum(), x, create_graph=True)[0]


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.head(x).float()


written("a gradient inside", _gradient_inside)
written("autocast inside", _autocast, **LINEAR)
written("dropout in a checkpoint", lambda m, x: checkpoint(m.inner, x, use_reentrant=False),
        inner=lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5)))


# modules of other kinds


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


written("a parametrisation of the user's", head, **LINEAR,
        change=lambda m: parametrize.register_parametrization(m.head, "weight", Symmetric()))
written("a module in TorchScript", lambda m, x: m.script(x), script=lambda: torch.jit.script(nn.Linear(DIM, DIM)))
written("a compiled module", lambda m, x: m.compiled(x), compiled=lambda: torch.compile(nn.Linear(DIM, DIM)))
written("parameters smaller than the mesh", lambda m, x: m.wide(m.narrow(x)) + m.none.sum(),
        narrow=lambda: nn.Linear(DIM, 1), wide=lambda: nn.Linear(1, DIM), none=lambda: nn.Parameter(torch.empty(0)))
