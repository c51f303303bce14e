"""The loss of a llama3 on one rank and on two: which large tensors its backward keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh

from workbench import author_module, capture, fake_world
from workbench.authoring.models.loss import CrossEntropy
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import saved_tensors
from workbench.notebook.draw.picture import Table, table

Decompositions = dict[Any, Any]


class _Output(nn.Module):
    """The last layer and the loss, with the vocabulary split over `mesh`."""

    def __init__(self, mesh: DeviceMesh | None):
        super().__init__()
        self.output, self.loss = nn.Linear(16, 64, bias=False), CrossEntropy()
        self.loss.mesh = mesh

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.loss(self.output(hidden), targets)  # type: ignore[no-any-return]


def loss_on(ranks: int, decompositions: Decompositions | None = None) -> JointGraph:
    """The joint graph of logits [8 tokens, 64 words] and their cross entropy, each rank with 64 words of its own."""
    batch = torch.empty(2, 4, 16), torch.zeros(2, 4, dtype=torch.long)
    with fake_world(ranks) as world:
        axes = world.mesh_of({"tp": ranks}) if ranks > 1 else None
        module = _Output(axes["tp"] if axes is not None else None)
        return capture(author_module(module, world, None, batch=lambda: batch), decompositions=decompositions)


def large_tensors(pairs: Mapping[str, ForwardBackward]) -> Table:
    """The saved tensors above 1,000 bytes: where each comes from, and what reads it."""
    rows = []
    for when, pair in pairs.items():
        nodes, inputs = ({n.name: n for n in graph.graph.nodes} for graph in pair.graphs)
        for row in saved_tensors(*pair.graphs):
            if row.held_bytes > 1000:
                readers = " ".join(str(user.target) for user in inputs[row.name].users)
                rows.append((when, row.name, row.held_bytes, str(nodes[row.root].meta["original_aten"]), readers))
    columns = ("case", "tensor", "bytes", "from the operator", "read in the backward by")
    return table("large tensors that the loss saves, each [8, 64]", columns, rows)
