"""Triton kernels that the user writes train as in eager PyTorch: a bare one, and one in an operator."""

import copy
from typing import Any

import pytest
import torch
from on_ranks import gradients
from torch import Tensor, nn

from workbench import World, author_module, capture, compile_step, partition

try:
    import triton
    import triton.language as tl
except ImportError:  # not installed with torch for CPUs
    triton = None

if triton is not None:

    @triton.jit
    def cubed_kernel(given, taken, size, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(given + at, at < size)
        tl.store(taken + at, value * value * value, at < size)

    def launched(x: Tensor, kernel: Any) -> Tensor:
        taken = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 64),)](x, taken, x.numel(), BLOCK=64)
        return taken

    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return launched(x, cubed_kernel)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    @torch.library.triton_op("zoo::cubed_by_kernel", mutates_args=())
    def in_an_operator(x: Tensor) -> Tensor:
        return launched(x, torch.library.wrap_triton(cubed_kernel))

    in_an_operator.register_autograd(lambda ctx, grad: 3 * ctx.saved_tensors[0] ** 2 * grad,
                                     setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))


class Cubed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).contiguous()
        return (Bare.apply(out) if self.kind == "bare" else in_an_operator(out)).square().mean()


def differences(kind: str) -> list[float]:
    """Between the gradients of a step and those of eager PyTorch, from the same weights."""
    gpu = World("nccl", 1, 0, torch.device("cuda", 0))
    ours, batch = Cubed(kind).cuda(), (torch.randn(4, 8).cuda(),)
    theirs = copy.deepcopy(ours)
    authored = author_module(ours, gpu, None, batch=lambda: batch)
    with capture(authored) as joint:
        compile_step(partition(joint))(*batch).backward()
    theirs(*batch).backward()
    found = gradients(authored)
    return [float((found[name] - p.grad).abs().max()) for name, p in theirs.named_parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["bare", "operator"])
def test_a_users_triton_kernel_trains_as_in_eager(kind: str) -> None:
    assert max(differences(kind)) < 1e-6
