"""Triton kernels that the user writes train as in eager PyTorch: a bare one, and one in an operator."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import author_module, capture, compile_step, current_world, partition, ranks

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


def trained(step: Any, module: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i in range(3):
        step(torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().cpu() for p in module.parameters()]


def differences(kind: str) -> list[float]:
    found = []
    for authored in (True, False):
        torch.manual_seed(0)
        module = Cubed(kind).cuda()
        if not authored:
            found.append(trained(module, module))
            continue
        world = current_world()
        made = author_module(module, world, world.mesh_of({"dp_shard": 1}), batch=lambda: (torch.randn(4, 8).cuda(),))
        with capture(made) as joint:
            found.append(trained(compile_step(partition(joint)), made.module))
    return [float((ours - theirs).abs().max()) for ours, theirs in zip(*found, strict=True)]


@pytest.mark.gpu
@pytest.mark.skipif(triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("kind", ["bare", "operator"])
def test_a_users_triton_kernel_trains_as_in_eager(kind: str) -> None:
    with ranks(1, backend="nccl", timeout=120, echo="none") as pool:
        (found,) = pool.run(differences, kind)
    assert max(found) < 1e-6
