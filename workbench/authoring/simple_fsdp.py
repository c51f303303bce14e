"""FSDP by parametrised parameters (SimpleFSDP, arXiv:2411.00284): a module's parameter is the shard, and reading it
gathers. So gathers and reductions are ordinary operators, which a capture records and passes can move.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

GATHERS = "workbench_gathers"
Strided = tuple[torch.Size, tuple[int, ...]]


def strided(shape: torch.Size) -> Strided:
    """A shape with the strides of a contiguous tensor."""
    return shape, torch.empty(shape, device="meta").stride()


@dataclass(frozen=True)
class Precision:
    """param: dtype of the gathered parameter and so of the computation; reduce: dtype of gradient reductions."""

    param: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32

    @property
    def stored(self) -> torch.dtype:
        """dtype of the shards and their gradients: at least float32."""
        return torch.promote_types(self.param, torch.float32)


@dataclass(frozen=True, eq=False)
class Gather:
    """Gathers one parameter from the ranks' shards for its module, and reduces its gradient back.

    Not an nn.Module, so that the module paths of its nodes do not contain it. Gradients are averaged over both
    data-parallel axes: reduce-scatter over dp_shard, then all-reduce over dp_replicate, as in FSDP2. Gradients of
    experts are summed over the ranks of their axes and multiplied by `factor`, one over the number of data-parallel
    ranks. part: shape and strides of the tensor-parallel part that all ranks of dp_shard hold together; whole: of the
    parameter.
    """

    part: Strided
    whole: Strided
    replicate_mesh: DeviceMesh | None
    shard_mesh: DeviceMesh | None
    tp_mesh: DeviceMesh | None
    tp_placements: tuple[Placement, ...]
    precision: Precision
    shard_dim: int = 0
    factor: float | None = None

    def __call__(self, shard: DTensor | torch.Tensor) -> torch.Tensor:
        """The stored parameter -> a plain tensor, or a DTensor on the tp axis where the plan asks for it."""
        x = self._gathered(shard)
        if self.tp_mesh is None:
            return x
        # in the backward, this also sums the gradient of a whole parameter over the ranks of the tp axis
        shape, stride = self.whole
        return DTensor.from_local(
            x, self.tp_mesh, self.tp_placements, run_check=False, shape=shape, stride=stride
        )

    def _gathered(self, shard: DTensor | torch.Tensor) -> torch.Tensor:
        """The plain tensor that the data-parallel ranks hold together."""
        x = shard.to_local() if isinstance(shard, DTensor) else shard
        if self.factor is not None:
            x = _ScaledGradient.apply(x, self.factor)
        if self.replicate_mesh is not None:
            x = self._redistributed(
                x, self.replicate_mesh, Replicate(), last=self.shard_mesh is None
            )
        if self.shard_mesh is not None:
            return self._redistributed(x, self.shard_mesh, Shard(self.shard_dim), last=True)
        return x if x.dtype == self.precision.param else x.to(self.precision.param)

    def _redistributed(
        self, x: torch.Tensor, mesh: DeviceMesh, placement: Placement, last: bool
    ) -> torch.Tensor:
        shape, stride = self.part if placement.is_shard() else (x.shape, x.stride())
        spread = DTensor.from_local(
            x, mesh, (placement,), run_check=False, shape=shape, stride=stride
        )
        whole = spread.redistribute(
            placements=(Replicate(),),
            forward_dtype=self.precision.param if last else x.dtype,
            backward_dtype=self.precision.reduce,
        )
        return whole.to_local(grad_placements=(Partial("avg" if self.factor is None else "sum"),))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gather:
        return self  # process groups cannot be copied, and the object is immutable


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradients[0] * ctx.factor, None


def _reader(name: str) -> property:
    def read(self: nn.Module) -> torch.Tensor:
        return self.__dict__[GATHERS][name](self._parameters[name])

    return property(read)


@cache
def _parametrised_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    # a subclass with properties, not torch.nn.utils.parametrize, which would rename parameters
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **{name: _reader(name) for name in names}})


def parametrise(module: nn.Module, gathers: dict[str, Gather]) -> None:
    """Have reads of `module`'s direct parameters (not of its children's) go through their entry in `gathers`."""
    module.__dict__[GATHERS] = dict(gathers)
    module.__class__ = _parametrised_class(type(module), tuple(gathers))  # type: ignore[arg-type]
