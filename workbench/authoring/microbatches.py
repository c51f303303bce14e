"""Gradient accumulation, eagerly: the gradients of several microbatches are added up unsharded, and reduced once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.authoring.simple_fsdp import GATHERS, Gather
from workbench.errors import WorkbenchError


def cut(batch: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """The inputs of a step as those of `count` microbatches: each tensor cut along its first dim, in order.

    Raises WorkbenchError for an input that has no first dim, or one that `count` does not divide.
    """
    if count == 1:
        return [tuple(batch)]
    for place, value in enumerate(batch):
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] % count:
            what = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise WorkbenchError(f"input {place} of the step is {what}, and {count} microbatches need a tensor whose "
                                 f"first dim divides by {count}: give such a batch, or accumulate over fewer")
    return list(zip(*(value.chunk(count) for value in batch), strict=True))


def summed_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers that count something in one forward, so that a step's count is the sum of them."""
    return [f"{path}.{name}" if path else name for path, part in module.named_modules()
            for name in getattr(part, "summed_buffers", ())]


def accumulate(module: nn.Module, batch: Sequence[Any], count: int) -> torch.Tensor:
    """Run forward and backward of `count` microbatches; returns the mean of their losses, without a graph.

    Each parameter's `grad` is that of the mean. Its data-parallel reduction runs once, on the sum of the unsharded
    gradients, which is held in the dtype of the reduction. Every rank calls it.
    """
    total: torch.Tensor | None = None
    buffers = {name: module.get_buffer(name) for name in summed_buffers(module)}
    counts: dict[str, torch.Tensor] = {}
    with _gathered_once(module) as unsharded:
        for inputs in cut(batch, count):
            unsharded.reads.clear()
            loss = module(*inputs)
            torch.autograd.backward(loss, torch.full_like(loss, 1 / count))
            unsharded.add_up()
            total = loss.detach() if total is None else total + loss.detach()
            counts = {name: counts[name] + held if counts else held.clone() for name, held in buffers.items()}
        unsharded.reduce()
    for name, held in buffers.items():
        held.copy_(counts[name])
    assert total is not None
    return total / count


Read = tuple[Gather, int]


class _Unsharded:
    """Gathered parameters by gather and how often it was called in this forward; their gradients' sums, not reduced."""

    def __init__(self) -> None:
        self.reads: dict[Gather, int] = {}
        self._whole: dict[Read, torch.Tensor] = {}
        self._leaves: list[tuple[Read, torch.Tensor]] = []
        self._sums: dict[Read, torch.Tensor] = {}

    def read(self, gather: Gather, shard: torch.Tensor) -> torch.Tensor:
        """What `gather(shard)` gives, cut off from the graph behind it."""
        this = gather, self.reads.get(gather, 0)
        self.reads[gather] = this[1] + 1
        if this not in self._whole:  # in the dtype of the reduction, which is the dtype of the sum
            exact = replace(gather, precision=replace(gather.precision, param=gather.precision.reduce))
            self._whole[this] = exact.whole(shard)
        leaf = self._whole[this].detach().to(gather.precision.param).requires_grad_(shard.requires_grad)
        self._leaves.append((this, leaf))
        return gather.placed(leaf)

    def add_up(self) -> None:
        for this, leaf in self._leaves:
            if leaf.grad is not None:
                gradient = leaf.grad.to(this[0].precision.reduce)
                self._sums[this] = self._sums[this] + gradient if this in self._sums else gradient
        self._leaves.clear()

    def reduce(self) -> None:
        reads = list(self._sums)
        if reads:
            torch.autograd.backward([self._whole[r] for r in reads], [self._sums[r] for r in reads])


@contextmanager
def _gathered_once(module: nn.Module) -> Iterator[_Unsharded]:
    """Inside, reading a parameter whose gradient is reduced gives a leaf; a parameter without reduction is as ever."""
    unsharded = _Unsharded()
    held = [part.__dict__[GATHERS] for part in module.modules() if GATHERS in part.__dict__]
    before = [dict(gathers) for gathers in held]
    try:
        for gathers in held:
            gathers |= {name: partial(unsharded.read, g) for name, g in gathers.items() if g.reduces}
        yield unsharded
    finally:
        for gathers, old in zip(held, before, strict=True):
            gathers |= old
