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


CHANGES = [
    ("count", lambda part: setattr(part, "count", 0.0)), ("new", lambda part: setattr(part, "new", 1)),
    ("count", lambda part: delattr(part, "count")), ("names", lambda part: part.names.append("b")),
    ("tables", lambda part: part.tables["a"]["b"].append(2)), ("seen", lambda part: part.seen.add(2)),
    ("queue", lambda part: part.queue.append(2)), ("array", lambda part: part.array.fill(1)),
    ("tensor", lambda part: setattr(part, "tensor", torch.ones(2))), ("training", lambda part: part.eval()),
]


def test_what_is_assigned_and_what_containers_hold():
    for name, act in CHANGES:
        assert changes(act) == [f"part.{name}"]
    assert changes(lambda part: part.mean.add_(1)) == []  # a capture follows buffers
