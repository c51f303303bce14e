"""A step of ten operators, and one pass on it, with values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from workbench import World, author_module, capture, compile_step, draw, partition, prove_numerics, run_joint
from workbench.graph.capture import JointGraph
from workbench.notebook.draw.picture import Table
from workbench.pipeline.run_passes import PassRecord


class Scaled(nn.Module):
    """`sum(x Wᵀ * scale)`: x is float32 [8, 16], and W [32, 16]."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 32, bias=False), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).sum()


def captured(scale: float) -> JointGraph:
    """`Scaled` on one rank, this process, with real values."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    alone = World("gloo", 1, 0, torch.device("cpu"))
    return capture(author_module(Scaled(scale), alone, None, batch=lambda: (x,)))


def judged(step: JointGraph, name: str) -> PassRecord:
    """The verdicts of the pass on a copy of the step; numerics only where lint passes, else the graph cannot run."""
    record, = run_joint(step.fork(), [name])
    lint = record.verdict("lint")
    if lint is not None and lint.outcome == "PASS":
        prove_numerics([record], compile_step(partition(step.fork())))
    return record


def outcomes(trials: Mapping[str, PassRecord]) -> Table:
    """Effect and numerics of each trial."""
    rows = []
    for name, record in trials.items():
        verdicts = (record.verdict(check) for check in ("effect", "numerics"))
        rows.append((name, *(str(verdict.outcome) if verdict else "-" for verdict in verdicts)))
    return draw.table("what the checks say", ("pass", "effect", "numerics"), rows)
