"""Expert routing on private names of torch: all-to-all with gradients, grouped matmuls, sizes read from a device."""

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
    x: torch.Tensor,
    mesh: DeviceMesh | None,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange rows of x over the 1-D `mesh`, in rank order: `sent[i]` rows to rank i, `received[i]` rows from it.

    Without counts, each rank gets an equal part. The gradient takes the reverse way. Without a mesh: x itself.
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
    """rows (m, dim) in groups of `counts` rows, each times its matrix of weights (groups, dim, out) -> (m, out).

    sizes: the counts as a tensor. One kernel in bfloat16 on a GPU, else one matmul for each group.
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return grouped_mm(rows, weights, offs=sizes.cumsum(0, dtype=torch.int32))
    parts = [
        part @ weight
        for part, weight in zip(rows.split(list(counts)), weights.unbind(), strict=True)
    ]
    return torch.cat(parts)


def known_sizes(counts: torch.Tensor, expected: Sequence[int]) -> list[int]:
    """Counts read from the device, all at once. A trace may assume that none is negative.

    expected: a likely value of each, for cost estimates without values.
    """
    on_host, sizes = counts.cpu(), []
    for i, value in enumerate(expected):
        with torch.fx.traceback.annotate({EXPECTED: value}):
            size = on_host[i].item()
        torch._check(size >= 0)
        sizes.append(size)
    return sizes  # type: ignore[return-value]  # of an integer tensor


def assume_equal(size: int, other: int) -> None:
    """Let a trace assume that two sizes are equal. Raises RuntimeError in a step where they differ."""
    torch._check(size == other)
