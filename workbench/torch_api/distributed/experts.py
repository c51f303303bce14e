"""What routing to experts needs of torch beyond its stable API: all-to-all that autograd knows, grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import grouped_mm

from workbench.torch_api.ops import EXPECTED


def all_to_all(
    x: torch.Tensor, mesh: DeviceMesh | None, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows of x to the ranks of the 1-D `mesh`, in rank order: `sent[i]` rows go to rank i, `received[i]` come from it.

    Without counts each rank gets an equal part. Its gradient goes the way back. Without a mesh: x itself.
    """
    if mesh is None:
        return x
    group: Any = mesh.get_group()
    came, went = (None if counts is None else list(counts) for counts in (received, sent))
    if x.requires_grad:
        return functional.all_to_all_single_autograd(x, came, went, group)
    return functional.wait_tensor(functional.all_to_all_single(x, came, went, group))


def grouped_matmul(
    rows: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """rows (m, dim) in groups of `counts` rows, each times its own of weights (groups, dim, out) -> (m, out).

    `sizes` holds the counts as a tensor. One kernel in bfloat16 on a GPU, else a product for each group.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(rows, weights, offs=sizes.cumsum(0, dtype=torch.int32))
    parts = [part @ weight for part, weight in zip(rows.split(list(counts)), weights.unbind(), strict=True)]
    return torch.cat(parts)


def known_sizes(counts: torch.Tensor, expected: Sequence[int]) -> list[int]:
    """Counts read from the device, all at once. A trace may assume that none is negative.

    `expected` holds a likely value of each, by which costs are estimated where there are no values.
    """
    here, sizes = counts.cpu(), []
    for i, value in enumerate(expected):
        with torch.fx.traceback.annotate({EXPECTED: value}):
            size = here[i].item()
        torch._check(size >= 0)
        sizes.append(size)
    return sizes  # type: ignore[return-value]  # of an integer tensor


def assume_equal(size: int, other: int) -> None:
    """Have a trace take two sizes for the same; RuntimeError in a step where they are not."""
    torch._check(size == other)
