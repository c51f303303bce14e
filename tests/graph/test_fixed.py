"""A compiled step refuses to run where an attribute that its forward read has changed since the capture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench import WorkbenchError, author_module, capture, compile_step, partition
from workbench.world.mesh import World

ALONE = World("gloo", 1, 0, torch.device("cpu"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.scale, self.unread = 0.5, 1

    def forward(self, x):
        return self.drop(self.layer(x)) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.config = nn.ModuleList([Block(), Block()]), SimpleNamespace(power=2.0)
        self.blocks[0].layer.bias.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.pow(self.config.power).mean()


@pytest.fixture
def step():
    authored = author_module(Net(), ALONE, None, batch=lambda: (torch.ones(2, 4),))
    with capture(authored) as joint:
        return compile_step(partition(joint))


def thaw(net: Net) -> None:
    net.blocks[0].layer.bias.requires_grad_(True)


@pytest.mark.parametrize(("change", "said"), [
    (lambda net: net.eval(), "module blocks.0.drop: its attribute 'training' was True at the capture and is False now"),
    (lambda net: setattr(net.blocks[1], "scale", 0.7), "module blocks.1: its attribute 'scale' was 0.5 at the capture"),
    (lambda net: delattr(net.blocks[1], "scale"), "attribute 'scale' was 0.5 at the capture and is gone now"),
    (lambda net: setattr(net.config, "power", 3.0), "its module's attribute 'config.power' was 2.0 at the capture"),
    (thaw, "parameter blocks.0.layer.bias was frozen at the capture and requires a gradient now"),
])
def test_a_change_between_the_steps_is_refused(step, change, said):
    step(torch.ones(2, 4))
    change(step.module)
    with pytest.raises(WorkbenchError, match=said):
        step(torch.ones(2, 4))


def test_what_the_forward_does_not_read_may_change(step):
    step.module.blocks[1].unread = 2
    step.module.blocks[1].drop.later = 1
    step.module.blocks[1].scale = 0.5
    for block in step.module.blocks:
        block.layer.requires_grad_(False)
    assert step(torch.ones(2, 4)).isfinite()
