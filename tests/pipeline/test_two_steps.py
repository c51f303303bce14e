"""One step of a module that returns anything: what is differentiated, and how its tensors are named."""

from typing import Any

import torch
from torch import nn

from workbench.pipeline.proofs.two_steps import differentiate, one_step


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        self.seen.append(x is y)
        return {"loss": (self.weight * x).mean(), "logits": [self.weight * y, y, None]}


def test_each_differentiable_output_counts_in_fixed_proportions():
    module, x = Pair(), torch.tensor([1.0, 2.0])
    named = differentiate(module(x, x))
    assert list(named) == ["output 0", "output 1", "output 2"]
    # of the scalar x / 2, with the weight 0.5; of the other x / 2, with the weights 0.5 and 1.5
    torch.testing.assert_close(module.weight.grad, 0.5 * x / 2 + torch.tensor([0.5, 1.5]) * x / 2)


def test_one_tensor_for_two_arguments_stays_one():
    module, x = Pair(), torch.ones(2)
    results = one_step(module, module, (x, x), 0, ())
    one_step(module, module, (x, x.clone()), 0, ())
    assert module.seen == [True, False] and "gradient of weight" in results
