"""The attributes that a forward changes, by name."""

from collections import deque

import numpy as np
import torch
from torch import nn

from workbench.graph.attributes import changed_attributes, module_attributes


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.names, self.tables, self.seen = 0, ["a"], {"a": {"b": [1]}}, {1}
        self.queue, self.tensor, self.array = deque([1]), torch.ones(2), np.zeros(2)
        self.register_buffer("mean", torch.ones(2))


def changes(act):
    module = nn.ModuleDict({"part": Part()})
    before = module_attributes(module)
    act(module["part"])
    return changed_attributes(before, module_attributes(module))


def test_what_is_assigned_and_what_containers_hold():
    assert changes(lambda part: None) == []
    assert changes(lambda part: setattr(part, "count", 1)) == ["part.count"]
    assert changes(lambda part: setattr(part, "count", 0.0)) == ["part.count"]
    assert changes(lambda part: part.names.append("b")) == ["part.names"]
    assert changes(lambda part: part.tables["a"]["b"].append(2)) == ["part.tables"]
    assert changes(lambda part: part.seen.add(2)) == ["part.seen"]
    assert changes(lambda part: part.queue.append(2)) == ["part.queue"]
    assert changes(lambda part: setattr(part, "tensor", torch.ones(2))) == ["part.tensor"]
    assert changes(lambda part: part.array.fill(1)) == ["part.array"]
    assert changes(lambda part: part.eval()) == ["part.training"]
    assert changes(lambda part: setattr(part, "new", 1)) == ["part.new"]
    assert changes(lambda part: delattr(part, "count")) == ["part.count"]
    # a capture follows buffers
    assert changes(lambda part: part.mean.add_(1)) == changes(lambda part: setattr(part, "mean", torch.zeros(2))) == []
