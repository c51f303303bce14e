"""Gradient accumulation: forward and backward of one microbatch after the other, and one update for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from workbench.errors import WorkbenchError


def cut(batch: Sequence[Any], count: int) -> list[tuple[Any, ...]]:
    """The inputs of a step as those of `count` microbatches: each tensor cut along its first dim, in order.

    Raises WorkbenchError for an input that has no first dim, or one that `count` does not divide.
    """
    if count == 1:
        return [tuple(batch)]
    for place, value in enumerate(batch):
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] % count:
            actual = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise WorkbenchError(
                f"input {place} of the step is {actual}, and {count} microbatches need a tensor whose "
                f"first dim divides by {count}: give such a batch, or accumulate over fewer"
            )
    return list(zip(*(value.chunk(count) for value in batch), strict=True))


def accumulate(
    run: Callable[..., torch.Tensor], module: nn.Module, batch: Sequence[Any], count: int
) -> torch.Tensor:
    """Run forward and backward of `count` microbatches; returns the mean of their losses, without a graph.

    run: the module, or its compiled step. Each parameter's `grad` is that of the mean: the gradients of each microbatch
    are reduced, and the shards added up. A buffer that counts something in one forward holds the sum afterwards.
    """
    total: Any = 0
    counters = step_counters(module)
    counts: dict[str, Any] = dict.fromkeys(counters, 0)
    for inputs in cut(batch, count):
        loss = run(*inputs)
        (loss / count).backward()
        total = total + loss.detach()
        for name, buffer in counters.items():
            counts[name] = counts[name] + buffer
    for name, buffer in counters.items():
        buffer.copy_(counts[name])
    return total / count


def step_counters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that each module names in `summed_buffers`: their counts start again with each step."""
    return {f"{path}.{name}": part.get_buffer(name) for path, part in module.named_modules()
            for name in getattr(part, "summed_buffers", ())}
