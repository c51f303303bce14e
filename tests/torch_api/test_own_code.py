"""The user's own code is answered as in eager PyTorch, and its global variables are found."""

from __future__ import annotations

import json
import os

import pytest
import torch
from torch import nn

from workbench import WorkbenchError, author_module, capture, compile_step, cut, partition
from workbench.torch_api.tracing import module_state, own_code
from workbench.world.mesh import World

ALONE = World("gloo", 1, 0, torch.device("cpu"))
SCALE = 2.0


class Setting:
    scale = 3.0


def scaled(x):
    return x * Setting.scale * float(os.environ.get("OWN_CODE", "1"))


class Net(nn.Module):
    def __init__(self, ask=None) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x):
        x = self.layer(x)
        return (x * 2 if self.ask is not None and self.ask() else self.inner(x)).mean()

    def inner(self, x):
        return scaled(x) * SCALE


def losses(ask, by="joint"):
    """What the compiled step and eager PyTorch give."""
    net = Net(ask)
    given = torch.ones(2, 4)
    eager = net(given).detach()
    authored = author_module(net, ALONE, None, batch=lambda: (given,))
    with capture(authored, by=by) as joint:
        step = compile_step(cut(joint) if by == "traced" else partition(joint))
    return step(given).detach(), eager


ASKS = [torch.compiler.is_compiling, torch.compiler.is_exporting, torch._dynamo.is_compiling]


@pytest.mark.parametrize("ask", ASKS)
def test_the_users_code_is_not_told_that_it_is_compiled(ask, monkeypatch):
    ours, eager = losses(ask)
    assert torch.allclose(ours, eager)
    monkeypatch.setattr(own_code, "is_own", lambda file: False)  # as an installed package is answered
    ours, eager = losses(ask)
    assert not torch.allclose(ours, eager)


def test_a_seed_in_a_traced_forward_is_refused(monkeypatch):
    def ask():
        return torch.random.initial_seed() < 0

    with pytest.raises(WorkbenchError, match="it calls torch's initial_seed in its forward"):
        losses(ask, "traced")
    monkeypatch.setattr(own_code, "is_own", lambda file: False)
    losses(ask, "traced")


def test_a_generator_that_the_forward_seeds_is_put_back():
    net = Net()
    net.draws = torch.Generator().manual_seed(1)
    held = module_state.generators(net)
    module_state.require_unseeded(held)
    net.draws.manual_seed(2)
    with pytest.raises(module_state.Untraceable, match="it seeds its generator 'draws' in its forward"):
        module_state.require_unseeded(held)
    module_state.require_unseeded(held)


def test_the_global_variables_of_a_forward_are_found_through_its_helpers():
    found, home = {*own_code.global_sources(Net())}, __name__
    assert {f"M['{home}'].SCALE", f"M['{home}'].Setting.scale", f"M['{home}'].scaled",
            "M['os'].environ._data[b'OWN_CODE']"} <= found
    assert not any("ALONE" in source for source in found)


@pytest.mark.parametrize(("file", "own"), [
    (__file__, True), ("<ipython-input-1>", True), (torch.nn.__file__, False), (json.__file__, False),
    (own_code.__file__, False),
    ("<frozen os>", False), ("/opt/site-packages/transformers/modeling.py", False),
])
def test_whose_a_file_is(file, own):
    assert own_code.is_own(file) is own
