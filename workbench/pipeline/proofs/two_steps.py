"""Two training steps of the module in eager PyTorch, and of the compiled step, each from the same state.

A second step shows what the first cannot: a number that a capture fixed, and that eager's first step changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.checks.numerics import moved_by_eps
from workbench.graph.attributes import changed_attributes, module_attributes
from workbench.graph.lower import Step
from workbench.graph.read.memory import inputs_written
from workbench.pipeline.train import apart, by_mesh
from workbench.torch_api import aot
from workbench.torch_api.determinism import seeded
from workbench.torch_api.distributed.adamw import ShardedAdamW
from workbench.torch_api.restoring import restoring, restoring_module, shard_of
from workbench.torch_api.tree import tree_leaves

Results = dict[str, Any]
LEARNING_RATE = 1e-3


@contextmanager
def _moved(module: nn.Module, batch: Sequence[Any], eps: float) -> Iterator[tuple[Any, ...]]:
    """Inside, the parameters are moved by `eps`, each element up or down; gives the batch, moved too."""
    shards = [shard_of(parameter).detach() for parameter in module.parameters()]
    with restoring(shards):
        for shard, value in zip(shards, moved_by_eps(shards, eps), strict=True):
            shard.copy_(value)
        yield tuple(moved_by_eps(batch, eps))


def two_steps(
    step: Step, batches: Sequence[tuple[Any, ...]], *, eps: float = 0.0
) -> tuple[Results, Results]:
    """(eager, compiled): the results of one step for each batch by name, and the attributes that eager changes.

    Between the steps AdamW updates the parameters by eager's gradients. The compiled step starts from eager's state:
    an update of its own would turn the rounding of a zero gradient into a whole learning rate. Parameters, buffers,
    gradients and random numbers are unchanged afterwards. eps: where it is not 0, eager stands in for the compiled
    step, with parameters and batch moved by it.
    """
    module, written = step.module, written_in_place(step)
    eager, compiled = Results(), Results()
    with restoring(module.parameters(), on_host=True), restoring_module(module):
        for number, batch in enumerate(batches):
            if number:  # its state, twice the model, is let go at once
                ShardedAdamW(
                    [{"params": same} for same in by_mesh(module.parameters())], lr=LEARNING_RATE
                ).step()
                module.zero_grad()
            ending = ", second step" if number else ""
            with restoring_module(module, written):
                if eps:
                    with _moved(module, batch, eps) as moved:
                        results = one_step(module, module, moved, number, written)
                else:
                    results = one_step(module, step, batch, number, written)
            compiled |= {name + ending: value for name, value in results.items()}
            buffers = [name + ending for name in results if name.startswith("buffer ")]
            before = module_attributes(module)
            results = one_step(module, module, batch, number, written)
            eager |= {name + ending: value for name, value in results.items()}
            after = module_attributes(module)
            for name in changed_attributes(before, after):
                title = f"attribute {name!r}, which the forward changes{ending}"
                eager[title], compiled[title] = _shown(after, name), _shown(before, name)
            if not all(name in eager for name in buffers):
                break  # eager has no such buffer any more, and the compiled step cannot start from that
    return eager, compiled


def optimizer_steps(
    step: Step, batches: Sequence[tuple[Any, ...]], *, eps: float = 0.0
) -> tuple[Results, Results]:
    """(eager, compiled): loss, norm, parameters, buffers and states after one step of the eager loop, and of a step
    that has an optimizer, on the first batch; eps as of `two_steps`.

    Both start from what module and optimizer hold now, which is unchanged afterwards.
    """
    batch = batches[0]
    eager = _eager_loop(step, batch)
    if eps:
        with _moved(step.module, batch, eps) as moved:
            return eager, _eager_loop(step, moved)
    names = [name for name, _ in step.module.named_parameters()]
    assert step.optimizer is not None
    with restoring_module(step.module, names), restoring(step.states), seeded(0):
        compiled = _left(step.module, step.optimizer, *step(*batch))
    return eager, compiled


def _eager_loop(step: Step, batch: Sequence[Any]) -> Results:
    """What a step of the eager loop leaves, from copies of the optimizer's states."""
    names = [name for name, _ in step.module.named_parameters()]
    assert step.optimizer is not None
    kind: Any = type(step.optimizer)
    optimizer = kind([dict(group) for group in step.optimizer.param_groups])
    for parameter, state in step.optimizer.state.items():
        optimizer.state[parameter] = {key: value.detach().clone() for key, value in state.items()}
    with restoring_module(step.module, names), seeded(0), torch.enable_grad():
        loop = apart(step.pair.authored, step.module, optimizer)
        return _left(step.module, optimizer, *loop(*batch))


def _left(
    module: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, norm: torch.Tensor
) -> Results:
    values = {"loss": loss, "norm": norm}
    for name, parameter in module.named_parameters():
        values[f"parameter {name}"] = parameter
        values |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
    values |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    return {name: shard_of(value).detach().clone() for name, value in values.items()}


def written_in_place(step: Step) -> Collection[str]:
    """The names of the parameters and buffers that the captured forward, or a pass's graph, writes in place."""
    inputs = [node for graph in step.pair.graphs for node in inputs_written(graph)]
    names = filter(None, map(aot.parameter_of, inputs))
    return {*step.pair.written, *names}


def differentiate(result: Any) -> Results:
    """Run the backward of a module's result, and name its tensors: of the loss, or of all outputs in fixed proportions.

    Each differentiable output but a lone scalar counts as its mean under weights from a half to one and a half.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if len(outputs) == 1 and not outputs[0].dim():
        outputs[0].backward()  # not autograd.grad, which a reentrant checkpoint refuses
        return {"loss": outputs[0]}
    total: Any = 0.0
    for output in outputs:
        if output.requires_grad:
            local = output.to_local() if isinstance(output, DTensor) else output
            size, device = local.numel(), local.device
            weights = torch.linspace(0.5, 1.5, size, device=device).view(local.shape)
            total = total + (local.float() * weights).mean()
    total.backward()
    return {f"output {place}": output for place, output in enumerate(outputs)}


def one_step(module: nn.Module, function: Callable[..., Any], batch: tuple[Any, ...], seed: int,
             written: Collection[str]) -> Results:
    """Outputs and gradients, and all buffers and the parameters of `written` as the step leaves them; cloned.

    function: the module, or its compiled step. The gradients stay in the parameters.
    """
    clones = {id(value): value.clone() for value in batch if isinstance(value, torch.Tensor)}
    with seeded(seed):
        named = differentiate(function(*(clones.get(id(value), value) for value in batch)))
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            named[f"gradient of {name}"] = parameter.grad
    named |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
    named |= {f"parameter {name}": p for name, p in module.named_parameters() if name in written}
    return {name: shard_of(value).detach().clone() for name, value in named.items()}


def _shown(attributes: dict[str, Any], name: str) -> str:
    if name not in attributes:
        return "absent"
    value = attributes[name]
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return repr(value)[:80]
