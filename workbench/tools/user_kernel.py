"""A user's own Triton kernel, for functions that Inductor compiles around it. To run it needs a GPU with Triton."""

import torch

from workbench.errors import WorkbenchError

try:
    import triton
    import triton.language as tl
except ImportError:  # not installed with torch for CPUs
    triton = None

if triton is not None:

    @triton.jit
    def scaled_sum_kernel(x, y, out, size, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(out + at, tl.load(x + at, inside) + scale * tl.load(y + at, inside), inside)


def scaled_sum(x: torch.Tensor, y: torch.Tensor, scale: float, block: int = 1024) -> torch.Tensor:
    """x + scale * y by a Triton kernel; both of one shape, contiguous, on a GPU. WorkbenchError without Triton."""
    if triton is None:
        raise WorkbenchError("scaled_sum is a Triton kernel, and Triton is not installed: torch for GPUs brings it")
    out = torch.empty_like(x)
    size = x.numel()
    scaled_sum_kernel[(triton.cdiv(size, block),)](x, y, out, size, scale, BLOCK=block)
    return out
