"""Odd modules that keep, share, hook or write something between their steps, and odd ways through autograd."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from zoo.models import DIM, SEQ, Written, odd, written

LINEAR = {"head": lambda: nn.Linear(DIM, DIM)}


def changed(change: Callable[[Any], Any], function: Callable[[Any, Tensor], Any] = lambda m, x: m.head(x),
            **parts: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A `Written` with a linear head, which `change` has had in its hands."""
    def make() -> nn.Module:
        module = Written(function, **{name: part() for name, part in (LINEAR | parts).items()})
        change(module)
        return module

    return make


# averages, and what else is kept from step to step


def _average_of_a_weight(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.shadow.lerp_(m.layer.weight, 0.1)
    return x + x @ m.shadow


def _average(m: Any, x: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
    return x - m.mean


def _last(m: Any, x: Tensor) -> Tensor:
    found = x if m.seen is None else x + m.seen
    m.seen = x.detach()
    return found


def _counted_in_a_list(m: Any, x: Tensor) -> Tensor:
    m.counts[0] += 1
    return x * m.counts[0]


def _counted_in_a_dictionary(m: Any, x: Tensor) -> Tensor:
    m.counts["calls"] = m.counts.get("calls", 0) + 1
    return x * m.counts["calls"]


def _registered_late(m: Any, x: Tensor) -> Tensor:
    m.register_buffer("late", x.detach().mean((0, 1)))
    return x - m.late


written("a moving average of a weight", _average_of_a_weight, shadow=lambda: torch.zeros(DIM, DIM))
written("a moving average in place", _average, mean=lambda: torch.zeros(DIM))
written("the last step's activation", _last, seen=lambda: None)
written("a counter in a list", _counted_in_a_list, counts=lambda: [0])
written("a counter in a dictionary", _counted_in_a_dictionary, counts=dict)
written("a buffer of the forward", _registered_late)
odd("a tensor that is no buffer")(
    changed(lambda m: object.__setattr__(m, "state", torch.zeros(())), lambda m, x: x * m.state.add_(1)))
odd("a buffer that is not saved, and one that is None")(changed(
    lambda m: (m.register_buffer("scale", torch.full((DIM,), 0.5), persistent=False), m.register_buffer("no", None)),
    lambda m, x: x * m.scale if m.no is None else x))
odd("normalisation that is frozen")(changed(
    lambda m: m.norm.eval(), lambda m, x: m.norm(x.flatten(0, 1)), norm=lambda: nn.BatchNorm1d(DIM)))


# shared memory and shared modules


def _halves(m: Any) -> None:
    both = torch.linspace(-1, 1, 2 * DIM)
    m.left, m.right = nn.Parameter(both[:DIM]), nn.Parameter(both[DIM:])


def _row(m: Any) -> None:
    m.row = m.head.weight.data[0]


odd("parameters that are views of one tensor")(changed(_halves, lambda m, x: x * m.left + m.right))
odd("a parameter that lies transposed")(changed(lambda m: setattr(
    m, "turned", nn.Parameter(torch.linspace(-1, 1, DIM * DIM).view(DIM, DIM).t())), lambda m, x: x @ m.turned))
odd("a buffer in a parameter's memory")(changed(
    lambda m: m.register_buffer("same", m.head.weight.data), lambda m, x: m.head(x) @ m.same))
odd("a row of a parameter, kept")(changed(
    _row, lambda m, x: m.head(x) * m.row))
odd("two buffers in one memory")(changed(
    lambda m: [m.register_buffer(name, m.zero) for name in ("one", "two")],
    lambda m, x: m.one.add_(1) * 0 + x * m.two, zero=lambda: torch.zeros(())))
odd("one module under two names")(changed(
    lambda m: setattr(m, "other", m.head), lambda m, x: m.other(torch.relu(m.head(x)))))
odd("modules in a plain list")(changed(
    lambda m: setattr(m, "hidden", [nn.Linear(DIM, DIM)]), lambda m, x: m.head(x)))


# hooks

odd("a hook with keywords")(changed(
    lambda m: m.head.register_forward_hook(lambda part, given, named, out: out + 1, with_kwargs=True)))
odd("a hook on a module's gradient")(changed(
    lambda m: m.head.register_full_backward_hook(lambda part, inner, outer: (inner[0] * 2,))))
odd("a hook on a parameter")(
    changed(lambda m: m.head.weight.register_hook(lambda grad: grad * 2)))
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


def _written_views(m: Any, x: Tensor) -> Tensor:
    found = x * 1
    found[:, 0].add_(1)
    found.view(-1)[:3].mul_(2)
    return found


written("a weight clamped in the forward", _clamped)
written("a weight decayed by its data", _decayed)
written("views written in place", _written_views)


@odd("an input written in place")
class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.layer(x)


# autograd


class Several(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        return x * factor, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        return 2 * grad * ctx.factor, None


def _several(m: Any, x: Tensor) -> Tensor:
    scaled, positive = Several.apply(x, 3.0)
    return scaled * positive


def _gradient_inside(m: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad((x ** 3).sum(), x, create_graph=True)[0]


def _autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.head(x).float()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))


written("a custom gradient of several results", _several)
written("a gradient inside", _gradient_inside)
written("autocast inside", _autocast, **LINEAR)
written("a vmap", lambda m, x: torch.func.vmap(torch.sin)(x))
written("dropout in a checkpoint", lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=dropping)
written("dropout in a reentrant checkpoint", lambda m, x: checkpoint(m.inner, x, use_reentrant=True), inner=dropping)
written("a branch by torch.cond", lambda m, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
written("a number read from a tensor", lambda m, x: x * float(x.mean()))
written("rows chosen by value", lambda m, x: x[x > 0])
written("Python's global random numbers", lambda m, x: x * random.random())


# modules of other kinds


class Parts(nn.Module):
    def forward(self, x: Tensor, *rest: Any, **named: Tensor) -> Any:
        return x, (x.sin(), [None, named["z"]])


def _through_a_tuple(m: Any, x: Tensor) -> Tensor:
    first, (second, (_, third)) = m.parts(x, 3, z=x)
    return first + second + third


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


written("a tuple between modules", _through_a_tuple, parts=Parts)
odd("a parametrisation of the user's")(changed(
    lambda m: parametrize.register_parametrization(m.head, "weight", Symmetric())))
odd("weight norm by hooks")(changed(lambda m: torch.nn.utils.weight_norm(m.head)))
odd("spectral norm by hooks")(changed(lambda m: torch.nn.utils.spectral_norm(m.head)))
written("a lazy module", lambda m, x: m.lazy(x), lazy=lambda: nn.LazyLinear(DIM))
written("a module in TorchScript", lambda m, x: m.script(x), script=lambda: torch.jit.script(nn.Linear(DIM, DIM)))
written("a compiled module", lambda m, x: m.compiled(x), compiled=lambda: torch.compile(nn.Linear(DIM, DIM)))
written("parameters smaller than the mesh", lambda m, x: m.wide(m.narrow(x)) + m.none.sum(),
        narrow=lambda: nn.Linear(DIM, 1), wide=lambda: nn.Linear(1, DIM), none=lambda: nn.Parameter(torch.empty(0)))
written("convolution in two dimensions", lambda m, x: m.conv(x.unsqueeze(1)), conv=lambda: nn.Sequential(
    nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)))
written("attention with dropout", lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
written("a Gumbel choice", lambda m, x: F.gumbel_softmax(x, hard=True))
written("a permutation that is drawn", lambda m, x: x[:, torch.randperm(SEQ)])
