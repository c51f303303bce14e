"""Odd modules that call operators which the user defines with torch.library."""

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


def _doubled(x: Tensor) -> Tensor:
    return x * 2


without_fake, without_backward, of_another_shape = (
    torch.library.custom_op(f"zoo::{name}", _doubled, mutates_args=())
    for name in ("without_fake", "without_backward", "of_another_shape"))

cubed.register_fake(torch.empty_like)
cubed.register_autograd(lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
                        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
counted.register_fake(lambda x, steps: torch.empty_like(x))
without_fake.register_autograd(lambda ctx, grad: grad * 2)
without_backward.register_fake(torch.empty_like)
of_another_shape.register_fake(lambda x: x.new_empty(x.shape[:-1]))
of_another_shape.register_autograd(lambda ctx, grad: grad * 2)

written("an operator that the user defines", lambda m, x: cubed(x))
written("an operator that writes a buffer", lambda m, x: x + counted(x.detach(), m.steps),
        steps=lambda: torch.zeros(()))
written("an operator without a fake", lambda m, x: without_fake(x))
written("an operator without a backward", lambda m, x: without_backward(x))
written("an operator whose fake is wrong", lambda m, x: of_another_shape(x))
