"""A compiled step refuses to run where an attribute that its forward read has changed since the capture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from workbench import WorkbenchError, author_module, capture, compile_step, partition
from workbench.torch_api.tracing import watched
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
    return compiled(Net())


def thaw(net: Net) -> None:
    net.blocks[0].layer.bias.requires_grad_(True)


def compiled(net):
    authored = author_module(net, ALONE, None, batch=lambda: (torch.ones(2, 4),))
    with capture(authored) as joint:
        return compile_step(partition(joint))


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


def test_a_setting_of_torch_that_changes_is_refused(step):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(WorkbenchError, match="'autocast' was None at the cap"):
        step(torch.ones(2, 4))
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(WorkbenchError, match="'default dtype' was torch.float32 at the capture and is torch.float"):
            step(torch.ones(2, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert step(torch.ones(2, 4)).isfinite()


def test_a_hook_on_all_modules_is_refused(step):
    hook = nn.modules.module.register_module_forward_hook(lambda part, given, out: out)
    try:
        with pytest.raises(WorkbenchError, match="it: hooks on all modules changed since the capture"):
            step(torch.ones(2, 4))
    finally:
        hook.remove()
    assert step(torch.ones(2, 4)).isfinite()


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(4, 4), [0.5, 2.0]

    def forward(self, x):
        return (self.layer(x) * self.scales[0]).mean()


def test_without_the_watch_a_changed_list_gives_the_old_loss(monkeypatch):
    step = compiled(Listed())
    before = step(torch.ones(2, 4))
    step.module.scales[0] = 1.0
    with pytest.raises(WorkbenchError, match="attribute 'scales' was .0.5, 2.0. at the capture and is .1.0, 2.0. now"):
        step(torch.ones(2, 4))
    monkeypatch.setattr(watched, "_same", lambda was, now: True)  # the fault that the watch is for
    assert torch.equal(step(torch.ones(2, 4)), before)
    assert not torch.allclose(step.module(torch.ones(2, 4)), before)


@pytest.mark.parametrize(("was", "now", "same"), [
    ([1, [2.0]], [1, [2.0]], True), ([1, [2.0]], [1, [3.0]], False), ((1, 2), (1, 2), True), ([1], [1, 2], False),
    ({"a": [1]}, {"a": [2]}, False), ({"a": 1}, {"b": 1}, False), ({1}, {1}, True), ({1}, {2}, False),
    (1, 1.0, False), (True, 1, False), (float("nan"), 1.0, False), (torch.relu, torch.tanh, False),
    (torch.float32, torch.float32, True), (torch.ones(1), torch.ones(1), False),
])
def test_what_counts_as_a_change(was, now, same):
    assert watched._same(watched._copy(was), now) is same


def test_a_change_inside_is_seen_in_the_copy():
    kept = {"a": [1, {2}]}
    copied = watched._copy(kept)
    assert watched._same(copied, kept)
    kept["a"][1].add(3)
    assert not watched._same(copied, kept)


class Makes(dict):
    """As a table of activations of transformers: what it holds are classes, and what it gives are their instances."""

    def __getitem__(self, key: str) -> object:
        return super().__getitem__(key)()


def test_a_dictionary_that_makes_what_it_gives_is_as_it_was() -> None:
    made = Makes(relu=torch.nn.ReLU)
    copied = watched._copy(made)
    assert watched._same(copied, made)
    made["relu"] = torch.nn.GELU
    assert not watched._same(copied, made)
