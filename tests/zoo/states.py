"""Odd modules that keep something between their steps, in Python or in buffers, and share, hook or write it; odd ways
through autograd.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, Written, odd, written

LINEAR = {"head": lambda: nn.Linear(DIM, DIM)}


def changed(change: Callable[[Any], Any], function: Callable[[Any, Tensor], Any] = lambda m, x: m.head(x),
            **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A `Written` with a linear head, which `change` has had in its hands."""
    def make() -> nn.Module:
        module = Written(function, **{name: part() for name, part in (LINEAR | parts).items()})
        change(module)
        return module

    return make


# attributes of the module


def _appended(m: Any, x: Tensor) -> Tensor:
    m.kept.append(x)
    return x * len(m.kept)


def _array_written(m: Any, x: Tensor) -> Tensor:
    m.array[0] += 1
    return x * torch.from_numpy(m.array)


written("activations in a list", _appended, kept=list)
written("numbers taken from an iterator", lambda m, x: x * next(m.kept), kept=itertools.count)
written("a generator of Python's random numbers", lambda m, x: x * m.kept.random(), kept=lambda: random.Random(0))
written("an array that is written", _array_written, array=lambda: np.zeros(DIM, np.float32))


# outside of the module, and the last step's gradient

CALLS = 0


def _global_number(m: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def _closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def function(m: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return function


def _by_gradient(m: Any, x: Tensor) -> Tensor:
    return x if m.layer.weight.grad is None else -x


written("a number that is a global", _global_number)
written("a number of a closure", _closure())
written("a branch on the last gradient", _by_gradient)


# averages, and what else is kept from step to step


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


written("a moving average of a weight", _average_of_a_weight, shadow=lambda: torch.zeros(DIM, DIM))
written("the last step's activation", _last, seen=lambda: None)
written("a buffer of the forward", _registered_late)
odd("a tensor that is no buffer")(
    changed(lambda m: object.__setattr__(m, "state", torch.zeros(())), lambda m, x: x * m.state.add_(1)))
odd("a buffer that is not saved, and one that is None")(changed(
    lambda m: (m.register_buffer("scale", torch.full((DIM,), 0.5), persistent=False), m.register_buffer("no", None)),
    lambda m, x: x * m.scale if m.no is None else x))


# shared memory and shared modules


def _halves(m: Any) -> None:
    both = torch.linspace(-1, 1, 2 * DIM)
    m.left, m.right = nn.Parameter(both[:DIM]), nn.Parameter(both[DIM:])


odd("parameters that are views of one tensor")(changed(_halves, lambda m, x: x * m.left + m.right))
odd("a buffer in a parameter's memory")(changed(
    lambda m: m.register_buffer("same", m.head.weight.data), lambda m, x: m.head(x) @ m.same))
odd("two buffers in one memory")(changed(
    lambda m: [m.register_buffer(name, m.zero) for name in ("one", "two")],
    lambda m, x: m.one.add_(1) * 0 + x * m.two, zero=lambda: torch.zeros(())))


# hooks

odd("a hook on a module's gradient")(changed(
    lambda m: m.head.register_full_backward_hook(lambda part, inner, outer: (inner[0] * 2,))))
odd("a hook on a parameter")(changed(lambda m: m.head.weight.register_hook(lambda grad: grad * 2)))
odd("a hook after a parameter's gradient")(changed(
    lambda m: m.head.weight.register_post_accumulate_grad_hook(lambda p: None)))


def _hooked_tensor(m: Any, x: Tensor) -> Tensor:
    found = x * 1
    found.register_hook(lambda grad: grad * 3)
    return found


written("a hook on a tensor", _hooked_tensor)


# writes


def _clamped(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.clamp_(-0.1, 0.1)
    return m.layer(x)


def _decayed(m: Any, x: Tensor) -> Tensor:
    m.layer.weight.data.mul_(0.9)
    return m.layer(x)


written("a weight clamped in the forward", _clamped)
written("a weight decayed by its data", _decayed)


@odd("an input written in place")
class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.layer(x)


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
written("a branch by torch.cond", lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
written("a number read from a tensor", lambda m, x: x * float(x.mean()))
written("rows chosen by value", lambda m, x: x[x > 0])
written("Python's global random numbers", lambda m, x: x * random.random())


# modules of other kinds


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


odd("a parametrisation of the user's")(changed(
    lambda m: parametrize.register_parametrization(m.head, "weight", Symmetric())))
written("a lazy module", lambda m, x: m.lazy(x), lazy=lambda: nn.LazyLinear(DIM))
written("a module in TorchScript", lambda m, x: m.script(x), script=lambda: torch.jit.script(nn.Linear(DIM, DIM)))
written("a compiled module", lambda m, x: m.compiled(x), compiled=lambda: torch.compile(nn.Linear(DIM, DIM)))
written("parameters smaller than the mesh", lambda m, x: m.wide(m.narrow(x)) + m.none.sum(),
        narrow=lambda: nn.Linear(DIM, 1), wide=lambda: nn.Linear(1, DIM), none=lambda: nn.Parameter(torch.empty(0)))
