"""A run of a module that leaves it as it was: what a forward may change, each restored, and each seen to change."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from workbench.errors import WorkbenchError
from workbench.torch_api.unchanged import unchanged

numpy_random = getattr(sys.modules.get("numpy"), "random", None)  # torch imports it where there is one


@dataclass
class Stats:
    calls: int = 0


class Busy(nn.Module):
    """Its forward changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.norm, self.frozen = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", torch.zeros(4), persistent=False)
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("spread", torch.zeros(1).expand(4))
        self.register_buffer("low", torch.full((2,), float("nan")))
        self.average = torch.zeros(4)
        self.calls, self.history, self.by_name, self.stats = 0, [1], {"a": {1}}, Stats()
        self.own, self.generator = random.Random(1), torch.Generator()

    def forward(self, x):
        y = self.norm(x) * self.weight + x * random.random() + torch.randn(4)
        self.total = self.total + 1
        self.grown.resize_(5).fill_(3)
        self.low.data = torch.ones(7, dtype=torch.float64)
        self.average.add_(1)
        self.weight = nn.Parameter(self.weight.detach() * 2)
        self.register_buffer("late", torch.ones(1))
        self.calls += 1
        self.history.append(2)
        self.by_name["a"].add(2)
        self.by_name["b"] = 1
        self.stats.calls += 1
        self.own.random()
        torch.rand(1, generator=self.generator)
        self.new = 1
        del self.spread
        self.norm.eval()
        return y.sum()


def seen(module):
    """Names and objects, values, places and plain attributes."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers()), "average": module.average}
    return ({n: (id(t), str(t.tolist()), t.shape, t.stride()) for n, t in tensors.items()},
            {n: t.data_ptr() for n, t in tensors.items() if n != "grown"},  # torch has given its memory back
            (module.calls, list(module.history), repr(module.by_name), module.stats.calls, sorted(vars(module))),
            (module.own.getstate(), module.generator.get_state().tolist()),
            {n: m.training for n, m in module.named_modules()}, sorted(module.state_dict()))


def drawn():
    return random.random(), float(torch.rand(1)), numpy_random and numpy_random.rand()


def states():
    return random.getstate(), numpy_random and str(numpy_random.get_state()), torch.get_rng_state().tolist()


def test_all_that_a_forward_changes_is_put_back():
    module, x = Busy(), torch.ones(3, 4)
    module.weight.grad = torch.full((4,), 7.0)
    gradient = module.weight.grad
    before, numbers = seen(module), states()
    with unchanged(module, batch=(x,)):
        module(x).backward()
        inside = seen(module)
        drawn()
        x.zero_()
    assert seen(module) == before and states() == numbers
    assert all(a != b for a, b in zip(inside, before, strict=True))
    assert module.weight.grad is gradient and gradient.tolist() == [7] * 4 and module.frozen.weight.grad is None
    assert x.tolist() == [[1] * 4] * 3


def test_also_where_the_run_raises():
    module = Busy()
    before = seen(module)
    with pytest.raises(ValueError, match="x"), unchanged(module):
        module(torch.ones(3, 4))
        raise ValueError("x")
    assert seen(module) == before


def test_a_parameter_is_put_back_where_it_is_known_to_be_written_and_refused_elsewhere():
    module = nn.Linear(2, 2)
    before, place = module.weight.tolist(), module.weight.data_ptr()
    with unchanged(module, written=["weight"]), torch.no_grad():
        module.weight.mul_(2)
    assert module.weight.tolist() == before and module.weight.data_ptr() == place
    with unchanged(module):  # replaced, not written
        module.weight.data = torch.zeros(2, 2)
    assert module.weight.tolist() == before and module.weight.data_ptr() == place
    with pytest.raises(WorkbenchError) as caught, unchanged(module), torch.no_grad():
        module.bias.add_(1)
    assert str(caught.value) == ("parameter 'bias' was written while a check ran the step, by something that the "
                                 "capture of its forward did not see, such as a hook: its value is lost. Write "
                                 "parameters in the forward or in the training loop, and build again")
