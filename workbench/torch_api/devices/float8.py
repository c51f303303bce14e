"""Scaled products of float8: their kernels by name, and their values on a CPU, in float32.

Every CPU emulates them. torch's CPU kernel asks oneDNN where the CPU has AMX for int8, and oneDNN's reference kernel
takes half a minute for 1024 x 1024 x 1024 where it has no float8 instructions, too. torch does not tell which CPUs have
them, and on CPUs without AMX it emulates as well.

Source: aten/src/ATen/native/Blas.cpp (_scaled_mm_out_cpu).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _product(
    left: torch.Tensor, right: torch.Tensor, left_scale: torch.Tensor, right_scale: torch.Tensor,
    bias: torch.Tensor | None = None, scale_result: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, *, out: torch.Tensor | None = None,
) -> torch.Tensor:
    product = (left.float() @ right.float()) * left_scale * right_scale
    if bias is not None:
        product = product + bias
    product = product.to(out_dtype or left.dtype)
    return product if out is None else out.copy_(product)


@functools.cache
def emulate_on_cpu() -> Any:
    """From now on `aten._scaled_mm` of CPU tensors multiplies in float32, in this process."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that its own kernel is replaced
        library.impl("_scaled_mm", _product, "CPU")
        library.impl("_scaled_mm.out", _product, "CPU")
    return library


_KERNELS = re.compile(r"^aten::_scaled_mm$|^nvjet_(?:sm\d+_)?q|^triton_tem_\w*_scaled_mm"
                      r"|^(?!.*elementwise)(?=.*(?:gemm|cutlass|tensorop)).*(?:e4m3|e5m2)")
"""The operator on a CPU; on a GPU, kernels of cuBLAS, Inductor's template, CUTLASS. A copy or a cast of float8 has the
type in its name, and a pointwise kernel of Inductor's the product that reads its result.
"""


def scaled_products(names: Counter[str]) -> int:
    """How many of these operators or kernels multiply float8 matrices."""
    return sum(count for name, count in names.items() if _KERNELS.search(name))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def operators_run(step: Callable[[], Any]) -> Counter[str]:
    """The operators that `step` calls, compiled code included, as `aten::mm`, with counts."""
    with _Operators() as seen:
        step()
    return seen.names
