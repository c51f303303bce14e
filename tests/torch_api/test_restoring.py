"""A run of a module that leaves its tensors as they were: each is restored, and each is seen to change."""

import random
import sys

import pytest
import torch
from torch import nn

from workbench.torch_api.restoring import restoring, restoring_module

numpy_random = getattr(sys.modules.get("numpy"), "random", None)  # torch imports it where there is one


class Busy(nn.Module):
    """Its forward writes and replaces buffers, and draws of all generators."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", torch.zeros(4), persistent=False)
        self.register_buffer("spread", torch.zeros(1).expand(4))

    def forward(self, x):
        y = self.norm(x) * self.weight + x * random.random() + torch.randn(4)
        self.total.add_(1)
        self.spread = torch.ones(4)
        return y.sum()


def seen(module):
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: (id(t), t.tolist(), t.data_ptr(), t.stride()) for name, t in tensors.items()}


def states():
    return random.getstate(), numpy_random and str(numpy_random.get_state()), torch.get_rng_state().tolist()


def test_all_is_put_back_also_where_the_run_raises():
    module = Busy()
    module.weight.grad = torch.full((4,), 7.0)
    gradient, before, numbers = module.weight.grad, seen(module), states()
    with pytest.raises(ValueError, match="x"), restoring_module(module, ["weight", "a buffer"]):
        module(torch.ones(3, 4)).backward()
        module.weight.data.mul_(2)
        inside, drawn = seen(module), states()
        raise ValueError("x")
    assert seen(module) == before and states() == numbers
    assert {name for name in before if inside[name] != before[name]} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "total", "spread", "weight"}
    assert drawn != numbers
    assert module.weight.grad is gradient and gradient.tolist() == [7] * 4 and module.frozen.weight.grad is None


def test_any_dtype_and_any_view_is_put_back():
    tensors = [torch.full((4,), float("nan")), torch.zeros(1).expand(4), torch.arange(6).view(2, 3).t(),
               torch.zeros(4, dtype=torch.float8_e4m3fn), torch.zeros(0), torch.ones(4, dtype=torch.complex64)]
    before = [str(tensor.tolist()) for tensor in tensors]
    for on_host in (False, True):
        with restoring(tensors, on_host=on_host):
            for tensor in tensors:
                tensor.untyped_storage().fill_(1)
        assert [str(tensor.tolist()) for tensor in tensors] == before
