"""Operators of no known library that draw random numbers without torch's tag, and a model that uses them."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NOISE, ADD_NOISE = "unknown_draws.noise", "unknown_draws.add_noise"


@torch.library.custom_op("unknown_draws::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@torch.library.custom_op("unknown_draws::add_noise", mutates_args=("x",))
def add_noise(x: Tensor) -> None:
    """In place, so that a capture wraps it in an operator of torch."""
    x.add_(torch.rand_like(x))


noise.register_fake(torch.empty_like)


class Layer(nn.Module):
    def __init__(self, in_place: bool):
        super().__init__()
        self.weight, self.in_place = nn.Parameter(torch.ones(8)), in_place

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_place:
            return x * noise(x.detach()) * self.weight
        drawn = torch.zeros_like(x)
        add_noise(drawn)
        return x * drawn * self.weight


class Noisy(nn.Module):
    """Linear in each weight: the sum of weight times gradient is the loss, if the backward has the forward's noise."""

    def __init__(self, layers: int = 2, in_place: bool = False, checkpoints: bool = False):
        super().__init__()
        self.layers, self.checkpoints = nn.ModuleList(Layer(in_place) for _ in range(layers)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.sum()


def drew_again(module: nn.Module, loss: Tensor) -> bool:
    """Whether the backward of `loss`, which this runs, has other noise than the forward had."""
    loss.backward()
    products = [(weight * weight.grad).sum() for weight in module.parameters()]  # type: ignore[operator]
    return not all(torch.allclose(product, loss, rtol=1e-4) for product in products)
