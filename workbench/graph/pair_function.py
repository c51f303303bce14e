"""A forward and a backward as one differentiable function, for a pair that comes without AOTAutograd's wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workbench.errors import WorkbenchError
from workbench.torch_api.restoring import shard_of


class PairFunction:
    """What AOTAutograd's wrapper does around a forward and a backward, for a pair that comes without one.

    Called with the module's parameters and buffers, and then this rank's batch, it returns the loss. names: qualified
    names of parameters and buffers, in this order. writes: buffers whose new values the forward returns before the
    loss. saved_order: for each input of the backward before the tangent, its place among what the forward saves.
    gradients: for each output of the backward the parameter's name, or None. inputs: what the forward takes of what was
    given; by default the shards of all of it.
    """

    def __init__(self, title: str, bodies: Sequence[Callable[[list[Any]], Sequence[Any]]], names: Sequence[str],
                 writes: Sequence[str], saved_order: Sequence[int], gradients: Sequence[str | None],
                 inputs: Callable[[Sequence[Any]], list[Any]] | None = None):
        self.title, self.bodies, self.names, self.writes = title, bodies, names, writes
        self.saved_order, self.gradients, self.inputs = saved_order, gradients, inputs or _shards

    def __call__(self, *args: Any) -> torch.Tensor:
        loss: torch.Tensor = _Differentiable.apply(self, *args)
        return loss

    def forward(self, args: Sequence[Any]) -> tuple[torch.Tensor, list[Any]]:
        """The loss, and what the backward takes before the tangent."""
        values = list(self.bodies[0](self.inputs(args)))
        by_name = dict(zip(self.names, args, strict=False))
        for name, value in zip(self.writes, values, strict=False):
            shard_of(by_name[name]).copy_(value)
        loss, *saved = values[len(self.writes):]
        return loss, [saved[place] for place in self.saved_order]

    def backward(self, saved: list[Any], tangent: torch.Tensor, args: Sequence[Any]) -> list[Any]:
        """For each of `args` its gradient, or None. Empties `saved`."""
        saved.append(tangent)
        outputs = zip(self.gradients, self.bodies[1](saved), strict=True)
        # no mesh
        gradients = {name: value for name, value in outputs if isinstance(value, torch.Tensor)}
        names = [*self.names, *[None] * (len(args) - len(self.names))]
        return [
            gradient_like(gradients.get(name), value) if name else None
            for name, value in zip(names, args, strict=True)
        ]


def _shards(args: Sequence[Any]) -> list[Any]:
    return [shard_of(value) if isinstance(value, torch.Tensor) else value for value in args]


def laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides, as autograd accumulates it: the fused AdamW walks through memory."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def gradient_like(gradient: Any, parameter: Any) -> Any:
    """The gradient of a shard as that of its parameter, in its memory layout, which autograd reads of the whole."""
    if gradient is None:
        return None
    gradient = laid_out_as(shard_of(parameter), gradient)
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, run_check=False,
                              shape=parameter.shape, stride=parameter.stride())


class _Differentiable(torch.autograd.Function):
    """Saved tensors go from one body to the other as a list, which the backward's body empties as it goes."""

    @staticmethod
    def forward(ctx: Any, pair: PairFunction, *args: Any) -> torch.Tensor:
        loss, ctx.saved = pair.forward(args)
        ctx.pair, ctx.args = pair, args
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        saved, ctx.saved = ctx.saved, None
        if saved is None:
            raise WorkbenchError(
                f"the compiled step of {ctx.pair.title}: its backward ran already, and what its "
                "forward saved is freed: run the forward again"
            )
        return None, *ctx.pair.backward(saved, tangent, ctx.args)
