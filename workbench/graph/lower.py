"""Lower: the partitioned pair gets the functions that run it, and becomes the step that a training loop calls."""

from __future__ import annotations

from typing import Any

import torch

from workbench.graph.capture import title
from workbench.graph.partition import ForwardBackward, Partitioned
from workbench.torch_api import aot


class CompiledStep:
    """One training step's forward; calling `backward()` on its loss runs the compiled backward.

    `step(tokens, targets)` takes this rank's int64 tensors of shape (batch, seq_len) and returns the loss, a scalar
    local to the rank. Gradients arrive in the module's own parameters. Raises WorkbenchError where an attribute that
    the forward reads has changed since the capture.
    """

    def __init__(self, pair: ForwardBackward):
        self.pair, self.module = pair, pair.authored.module

    def __call__(self, *batch: Any) -> torch.Tensor:
        self.pair.fixed.require_unchanged(title(self.pair.authored))
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        flat = [parameters[n] for n in self.pair.parameters] + [buffers[n] for n in self.pair.buffers]
        return self.pair.function(*flat, *batch)

    def close(self) -> None:
        """Free the CUDA graphs that the bodies hold, before the process groups end. May be called twice."""
        for slot in self.pair.slots:
            close = getattr(slot.body, "close", None)
            if close is not None:
                close()

    def __repr__(self) -> str:
        bodies = ", ".join("open" if s.body is None else type(s.body).__name__ for s in self.pair.slots)
        return f"CompiledStep({title(self.pair.authored)}: {bodies})"


def compile_step(pair: ForwardBackward, bodies: tuple[Any, ...] | None = None) -> CompiledStep:
    """The step that runs `bodies`, as a lowering pass returned them, or else the graphs, node by node.

    A body is called with one list, which it may empty.
    """
    bind(pair, bodies)
    return CompiledStep(pair)


def bind(pair: Partitioned, bodies: tuple[Any, ...] | None = None) -> None:
    """Set the bodies of both directions: see `compile_step`. Raises UnusableGraph where a pass broke a graph."""
    pair.require_usable()
    chosen = bodies or tuple(aot.boxed(graph) for graph in pair.graphs)
    for slot, body in zip(pair.slots, chosen, strict=True):
        slot.body = body
