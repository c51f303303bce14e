"""Compile: bodies for the partitioned pair, and the step that a training loop calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.graph.capture import title
from workbench.graph.partition import ForwardBackward, Partitioned
from workbench.torch_api import aot

Body = Callable[[list[Any]], Any]


class CompiledStep:
    """One training step's forward; calling `backward()` on its loss runs the compiled backward.

    `step(tokens, targets)` takes this rank's int64 tensors of shape (batch, seq_len) and returns the loss, a scalar
    local to the rank. Gradients arrive in the module's own parameters.
    """

    def __init__(self, pair: ForwardBackward):
        self.pair, self.module = pair, pair.authored.module

    def __call__(self, *batch: Any) -> torch.Tensor:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        flat = [parameters[n] for n in self.pair.parameters] + [buffers[n] for n in self.pair.buffers]
        return self.pair.function(*flat, *batch)

    def close(self) -> None:
        """Free what the bodies hold beside memory, CUDA graphs; before the process groups go. May be called twice."""
        for slot in self.pair.slots:
            close = getattr(slot.body, "close", None)
            if close is not None:
                close()

    def __repr__(self) -> str:
        bodies = ", ".join("open" if s.body is None else type(s.body).__name__ for s in self.pair.slots)
        return f"CompiledStep({title(self.pair.authored)}: {bodies})"


def compile_step(pair: ForwardBackward, bodies: tuple[Body, Body] | None = None) -> CompiledStep:
    """Bind the bodies: those that a lowering pass made, or the graphs themselves, run node by node.

    A body takes one list and may empty it.
    """
    bind(pair, bodies)
    return CompiledStep(pair)


def bind(pair: Partitioned, bodies: tuple[Body, Body] | None = None) -> None:
    """Give both directions their bodies: see `compile_step`. Raises UnusableGraph where a pass broke one."""
    pair.require_usable()
    chosen = bodies or tuple(aot.boxed(graph) for graph in pair.graphs)
    for slot, body in zip(pair.slots, chosen, strict=True):
        slot.body = body
