"""Scaled products of float8 on a CPU, in float32.

torch's CPU kernel asks oneDNN, whose reference kernel takes half a minute for 1024 x 1024 x 1024 where the CPU has no
float8 instructions.

Source: aten/src/ATen/native/Blas.cpp (_scaled_mm_out_cpu).
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch


def _product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, *, out: torch.Tensor | None = None,
) -> torch.Tensor:
    found = (left.float() @ right.float()) * left_scale * right_scale
    found = found if bias is None else found + bias
    found = found.to(out_dtype or left.dtype)
    return found if out is None else out.copy_(found)


@functools.cache
def emulate_on_cpu() -> Any:
    """From now on `aten._scaled_mm` of CPU tensors multiplies in float32, in this process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that its own kernel is replaced
        library.impl("_scaled_mm", _product, "CPU")
        library.impl("_scaled_mm.out", _product, "CPU")
    return library
