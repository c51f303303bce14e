"""Lower: the partitioned pair gets the functions that run it, and becomes the step that a training loop calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.graph.capture import title
from workbench.graph.model_contract import refusing_inference_tensors
from workbench.graph.partition import ForwardBackward, Partitioned, Split
from workbench.torch_api import aot


class Step:
    """What `build` gives and a training loop calls: a CompiledStep, or what a plugin's kind of step makes.

    split: the graphs that it runs. written: names of the parameters and buffers that one step writes. states: the other
    tensors that it writes. optimizer: where the step itself updates the parameters; calling it then gives
    (loss, norm), scalars on this rank's device, and `inputs(*batch)` what its graph takes. None: calling it gives the
    loss, whose backward the caller runs.
    """

    optimizer: torch.optim.Optimizer | None = None
    inputs: Callable[..., list[Any]]

    def __init__(self, split: Split):
        self.split, self.pair, self.module = split, split.pair, split.pair.authored.module
        self.written: Sequence[str] = self.pair.written
        self.states: list[torch.Tensor] = []

    def __call__(self, *batch: Any) -> Any:
        raise NotImplementedError

    def once(self, *batch: Any) -> None:
        """All of one step, from the forward on."""
        self(*batch)

    def close(self) -> None:
        """Free the CUDA graphs that the bodies hold, before the process groups end. May be called twice."""
        for slot in self.split.slots:
            close = getattr(slot.body, "close", None)
            if close is not None:
                close()

    def __repr__(self) -> str:
        bodies = [
            "open" if slot.body is None else type(slot.body).__name__ for slot in self.split.slots
        ]
        return f"{type(self).__name__}({title(self.pair.authored)}: {', '.join(bodies)})"


class CompiledStep(Step):
    """One training step's forward; calling `backward()` on its loss runs the compiled backward.

    `step(tokens, targets)` takes this rank's int64 tensors of shape (batch, seq_len) and returns the loss, a scalar
    local to the rank. Gradients arrive in the module's own parameters. Raises WorkbenchError for a batch of another
    kind than the capture's.
    """

    def __call__(self, *batch: Any) -> torch.Tensor:
        self.pair.inputs.require(title(self.pair.authored), batch)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        flat = [parameters[n] for n in self.pair.parameters] + [
            buffers[n] for n in self.pair.buffers
        ]
        with refusing_inference_tensors(self.pair.authored):
            return self.pair.function(*flat, *batch)

    def once(self, *batch: Any) -> None:
        self(*batch).backward()


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
