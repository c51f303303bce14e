"""Forwards that a capture takes, freezes or refuses, each run three times beside eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from workbench import WorkbenchError, author_module, capture, draw, fake_world
from workbench.notebook.draw.picture import Table

DIM = 16
Forward = Any
"""A function of a `Layer` and the output of its linear layer, float32 [8, 1], which returns as much."""


class Layer(nn.Module):
    """`act(self, linear(x)).sum()`; `calls` is a number of Python, and `total` a buffer, float32 []."""

    def __init__(self, act: Forward) -> None:
        super().__init__()
        self.linear, self.act, self.calls = nn.Linear(DIM, 1), act, 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, self.linear(x)).sum()


def eager_losses(layer: Layer) -> list[float]:
    """The losses of three calls."""
    return [layer(torch.ones(8, DIM)).item() for _ in range(3)]


def graph_losses(act: Forward, by: str, layer: Layer) -> list[float]:
    """The losses of three runs of one captured graph, with the weights of `layer`.

    A run returns the buffers that it writes, before the loss. Raises WorkbenchError where the capture refuses.
    """
    graph = _captured(act, by)
    total, losses = torch.zeros(()), []
    for _ in range(3):
        inputs = [layer.linear.weight, layer.linear.bias, total, torch.ones(8, DIM)]
        (*written, loss), _gradients = graph(inputs, [torch.ones(())])
        total = written[0] if written else total
        losses.append(loss.item())
    return losses


def outcomes(forwards: Sequence[Forward]) -> dict[str, list[str]]:
    """What the joint and the traced capture make of each forward: right, wrong in some steps, or refused."""
    with redirect_stdout(StringIO()):
        return {act.__name__: [_outcome(act, by) for by in ("joint", "traced")] for act in forwards}


def outcome_table(results: dict[str, list[str]]) -> Table:
    """A row for each forward."""
    rows = [(name, *said) for name, said in results.items()]
    return draw.table("three steps beside eager PyTorch", ("forward", "joint", "traced"), rows)


def wrong_counts(act: Forward) -> dict[str, int]:
    """How many of three losses are not 1, 2 and 3 times the plain layer's, in eager PyTorch and in both graphs."""
    plain = Layer(lambda m, y: y)
    once = eager_losses(plain)[0]
    layer = Layer(act)
    layer.load_state_dict(plain.state_dict())
    wrong = {"wrong losses in eager PyTorch": _wrong(eager_losses(layer), once)}
    for by in ("joint", "traced"):
        try:
            losses = graph_losses(act, by, plain)
        except WorkbenchError:
            losses = [float("nan")] * 3
        wrong[f"wrong losses of the {by} graph"] = _wrong(losses, once)
    return wrong


def _wrong(losses: Sequence[float], once: float) -> int:
    return sum(not abs(loss - n * once) <= 1e-4 for n, loss in enumerate(losses, 1))


def _captured(act: Forward, by: str) -> GraphModule:
    with fake_world(1) as world, warnings.catch_warnings(action="ignore"):  # Dynamo warns of side effects
        module = author_module(Layer(act), world, None, batch=lambda: (torch.empty(8, DIM),))
        return capture(module, by=by).graph


def _outcome(act: Forward, by: str) -> str:
    layer = Layer(act)
    try:
        ours = graph_losses(act, by, layer)
    except WorkbenchError as error:
        return f"refused: {type(error.__cause__).__name__}"
    wrong = [str(n) for n, (a, b) in enumerate(zip(ours, eager_losses(layer), strict=True), 1) if abs(a - b) > 1e-4]
    return f"wrong in step {', '.join(wrong)}" if wrong else "right"
