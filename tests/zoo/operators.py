"""Odd modules that call operators which the user defines with torch.library."""

import importlib.util

import torch
from torch import Tensor

from zoo.models import written


@torch.library.custom_op("zoo::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x ** 3


@torch.library.custom_op("zoo::counted", mutates_args=("steps",))
def counted(x: Tensor, steps: Tensor) -> Tensor:
    steps.add_(1)
    return x * steps


@torch.library.custom_op("zoo::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("zoo::without_backward", mutates_args=())
def without_backward(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("zoo::of_another_shape", mutates_args=())
def of_another_shape(x: Tensor) -> Tensor:
    return x * 2


cubed.register_fake(torch.empty_like)
cubed.register_autograd(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
                        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
counted.register_fake(lambda x, steps: torch.empty_like(x))
without_fake.register_autograd(lambda ctx, grad: grad * 2)
without_backward.register_fake(torch.empty_like)
of_another_shape.register_fake(lambda x: x.new_empty(x.shape[:-1]))
of_another_shape.register_autograd(lambda ctx, grad: grad * 2)

LIBRARY = torch.library.Library("zoo", "FRAGMENT")  # the older way
LIBRARY.define("doubled_by_key(Tensor x) -> Tensor")
LIBRARY.impl("doubled_by_key", lambda x: x * 2, "CPU")
LIBRARY.impl("doubled_by_key", torch.empty_like, "Meta")

written("an operator that the user defines", lambda m, x: cubed(x))
written("an operator that writes a buffer", lambda m, x: x + counted(x.detach(), m.steps),
        steps=lambda: torch.zeros(()))
written("an operator without a fake", lambda m, x: without_fake(x))
written("an operator without a backward", lambda m, x: without_backward(x))
written("an operator whose fake is wrong", lambda m, x: of_another_shape(x))
written("an operator of a library, by key", lambda m, x: torch.ops.zoo.doubled_by_key(x))


def _launched(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.library.wrap_triton(lambda given, taken: None)[(1,)](x, out)
    return out


if importlib.util.find_spec("triton") is None:
    launched = torch.library.triton_op("zoo::launched", _launched, mutates_args=())
    written("an operator of a Triton kernel where Triton is not installed", lambda m, x: launched(x))
