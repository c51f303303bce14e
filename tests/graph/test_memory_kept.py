"""A capture whose result was dropped leaves nothing in the process."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from workbench import author_module, capture, partition

pytestmark = pytest.mark.integration


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x, y):
        return (self.layers(x).tanh() - y).square().mean()


def doubled(x):
    return x * 2


def test_no_global_in_the_models_file_and_no_graph(fake4):
    """Also a function of the same file that was compiled before keeps its own."""
    def batch():
        with fake4.fake_mode:
            return torch.empty(8, 16), torch.empty(8, 16)

    compiled, x = torch.compile(doubled, backend="eager"), torch.ones(3)
    assert torch.equal(compiled(x), x * 2)
    authored = author_module(Mlp(), fake4, fake4.mesh_of({"dp_shard": 4}), batch=batch)
    capture(authored)  # names of modules, such as __import_torch, come once and are shared with torch.compile
    before = set(vars(sys.modules[__name__]))
    joint = capture(authored)
    assert set(vars(sys.modules[__name__])) == before
    partition(joint)
    gone = [weakref.ref(joint.graph), weakref.ref(joint.tracing_context)]
    del joint
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert torch.equal(compiled(x), x * 2)
