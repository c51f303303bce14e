"""A small model's step to record, and loops that train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from workbench.authoring.author import author_module
from workbench.graph.capture import capture
from workbench.graph.lower import Step, compile_step
from workbench.graph.partition import partition
from workbench.pipeline.run_passes import PassRecord, run_partitioned
from workbench.recipe.sections import PassSpec
from workbench.world.mesh import World
from workbench_lessons.l08_replay_with_cudagraphs.replay_rehearsal import rehearse


class MLP(nn.Module):
    """Two linear layers with a relu between them, and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.down(self.up(x).relu()) - y) ** 2).mean()


def batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, both [rows, 16]."""
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(rows, 16, generator=numbers), torch.randn(rows, 16, generator=numbers)


def built(*passes: str | PassSpec) -> tuple[Step, list[PassRecord]]:
    """The MLP's step with these passes, and a record of each; a replay is rehearsed, as on a machine without a GPU."""
    torch.manual_seed(0)
    alone = World("gloo", 1, 0, torch.device("cpu"))
    pair = partition(capture(author_module(MLP(), alone, None, batch=lambda: batch(0))))
    rehearse(pair)
    records, bodies = run_partitioned(pair, passes)
    return compile_step(pair, bodies), records


def moves_the_loss(line: str) -> bool:
    """Whether a recorded step, after six steps of training, has another loss once this line of code has run.

    The line may name `torch`, `model`, its weight `w` and `zeroed`, a state dict in which `w` is zero.
    """
    step, _ = built("cudagraph")
    list(training(step, sgd))
    before = step(*batch(6)).item()
    model = step.module
    w = model.get_parameter("down.weight")
    zeroed = {**model.state_dict(), "down.weight": w * 0}
    exec(line, {"torch": torch, "model": model, "w": w, "zeroed": zeroed})
    return bool(step(*batch(6)).item() != before)


def training(step: Step, update: Callable[[nn.Module, int], None], steps: Iterable[int] = range(6)) -> Iterator[float]:
    """Train by a loop in which `update` changes the parameters; yields the losses."""
    for i in steps:
        loss = step(*batch(i))
        loss.backward()
        update(step.module, i)
        yield loss.item()


def sgd(module: nn.Module, i: int) -> None:
    """Change each parameter in place, and drop its gradient."""
    for p in module.parameters():
        p.data.sub_(0.1 * p.grad)  # type: ignore[operator]
    module.zero_grad(set_to_none=True)
