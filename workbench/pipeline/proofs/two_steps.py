"""Two training steps of the module in eager PyTorch, and of the compiled step, each from the same state.

A second step shows what the first cannot: a number that a capture fixed, and that eager's first step changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from workbench.graph.attributes import changed_attributes, module_attributes
from workbench.graph.lower import CompiledStep
from workbench.graph.read.memory import inputs_written
from workbench.torch_api import aot
from workbench.torch_api.determinism import seeded
from workbench.torch_api.restoring import restoring, restoring_module, shard_of

Results = dict[str, Any]
LEARNING_RATE = 1e-3


def two_steps(step: CompiledStep, batches: Sequence[tuple[Any, ...]]) -> tuple[Results, Results]:
    """(eager, compiled): the results of one step for each batch by name, and the attributes that eager changes.

    Between the steps AdamW updates the parameters by eager's gradients. The compiled step starts from eager's state:
    an update of its own would turn the rounding of a zero gradient into a whole learning rate. Parameters, buffers,
    gradients and random numbers are unchanged afterwards.
    """
    module = step.module
    eager, compiled = Results(), Results()
    with restoring(module.parameters(), on_host=True), restoring_module(module):
        update = _AdamW(module)
        for number, batch in enumerate(batches):
            ending = ", second step" if number else ""
            with restoring_module(module, written_parameters(step)):
                results = one_step(step, step, batch, number)
            compiled |= {name + ending: value for name, value in results.items()}
            buffers = [name + ending for name in results if name.startswith("buffer ")]
            before = module_attributes(module)
            results = one_step(step, module, batch, number)
            eager |= {name + ending: value for name, value in results.items()}
            after = module_attributes(module)
            for name in changed_attributes(before, after):
                title = f"attribute {name!r}, which the forward changes{ending}"
                eager[title], compiled[title] = _shown(after, name), _shown(before, name)
            if not all(name in eager for name in buffers):
                break  # eager has no such buffer any more, and the compiled step cannot start from that
            update(results)
    return eager, compiled


def written_parameters(step: CompiledStep) -> Collection[str]:
    """The names of the parameters that the captured forward or a pass's graph writes in place."""
    inputs = [node for graph in step.pair.graphs for node in inputs_written(graph)]
    names = filter(None, map(aot.parameter_of, inputs))
    return {*step.pair.written, *names} & {name for name, _ in step.module.named_parameters()}


def one_step(step: CompiledStep, function: Callable[..., Any], batch: tuple[Any, ...], seed: int) -> Results:
    """Loss and gradients on this rank, and buffers and written parameters as the step leaves them; all cloned."""
    module = step.module
    with seeded(seed):
        loss = function(*(value.clone() if isinstance(value, torch.Tensor) else value for value in batch))
        loss.backward()  # not autograd.grad, which a reentrant checkpoint refuses
    named = {"loss": loss}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            named[f"gradient of {name}"] = parameter.grad
            parameter.grad = None
    named |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    written = written_parameters(step)
    named |= {f"parameter {name}": p for name, p in module.named_parameters() if name in written}
    return {name: shard_of(value).detach().clone() for name, value in named.items()}


class _AdamW:
    """torch's AdamW on this rank's shards, whatever their meshes."""

    def __init__(self, module: nn.Module):
        self.shards = {name: shard_of(p).detach() for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.shards.values(), lr=LEARNING_RATE)

    def __call__(self, results: Results) -> None:
        for name, shard in self.shards.items():
            gradient = results.get(f"gradient of {name}")
            shard.grad = None if gradient is None else gradient.to(shard.dtype)
        self.optimizer.step()


def _shown(attributes: dict[str, Any], name: str) -> str:
    if name not in attributes:
        return "absent"
    value = attributes[name]
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)[:80]
