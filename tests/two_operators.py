"""The operators that send while they multiply, on a device for which torch has no kernels of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed import _symmetric_memory as symm_mem


@contextmanager
def as_two_operators(device: str) -> Iterator[None]:
    """Inside, tensors of this device ("CPU") can be given to the operators, which then send first and multiply after.

    torch's own fallbacks, by which values can be checked where no GPU is.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    try:
        library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, device)
        library.impl(
            "fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, device
        )
        yield
    finally:
        library._destroy()
