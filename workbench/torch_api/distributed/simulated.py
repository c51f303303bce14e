"""The values of all ranks in one process: torch's local-tensor mode behind four functions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed._local_tensor import (
    LocalTensor,
    LocalTensorMode,
    maybe_disable_local_tensor_mode,
)


def simulate_ranks(size: int) -> AbstractContextManager[Any]:
    """A mode under which collectives of the fake default group compute the values of ranks 0 to size - 1."""
    return LocalTensorMode(frozenset(range(size)))


def make_per_rank(make: Callable[[int], torch.Tensor], ranks: range) -> torch.Tensor:
    """One tensor that holds `make(rank)` for each rank."""
    # or each tensor that `make` returns would hold values of all ranks
    with maybe_disable_local_tensor_mode():
        values = {rank: make(rank) for rank in ranks}
    return LocalTensor(values)


def is_per_rank(tensor: torch.Tensor) -> bool:
    """Whether `tensor` holds one value per rank."""
    return isinstance(tensor, LocalTensor)


def per_rank_values(tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """The value of `tensor` on each rank, by rank."""
    if not isinstance(tensor, LocalTensor):
        raise TypeError(f"expected a tensor with one value per rank, not {type(tensor).__name__}")
    return dict(tensor._local_tensors)
