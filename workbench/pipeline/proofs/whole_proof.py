"""The whole step in one graph, and the eager loop: one step of each, from the same start."""

from __future__ import annotations

from typing import Any

import torch

from workbench.graph.update import STATE
from workbench.graph.whole_step import WholeStep
from workbench.pipeline.train import apart, optimizer_of
from workbench.torch_api.determinism import seeded
from workbench.torch_api.restoring import restoring, restoring_module, shard_of

Results = dict[str, torch.Tensor]


def whole_steps(step: WholeStep, batch: tuple[Any, ...]) -> tuple[Results, Results]:
    """(eager, whole): loss, norm, parameters, buffers and the optimizer's state after one step, on this rank.

    Both start from what the module and the step's optimizer hold now, which is unchanged afterwards.
    """
    step.inputs(*batch)  # makes the state
    names = [name for name, _ in step.module.named_parameters()]
    optimizer = optimizer_of(step.pair.authored)
    for group, own in zip(optimizer.param_groups, step.optimizer.param_groups, strict=True):
        group["lr"].fill_(own["lr"])
    for parameter, state in step.optimizer.state.items():
        optimizer.state[parameter] = {key: value.detach().clone() for key, value in state.items()}
    with restoring_module(step.module, names), seeded(0), torch.enable_grad():
        eager = _results(step, optimizer, *apart(step.pair.authored, step.module, optimizer)(*batch))
    with restoring_module(step.module, names), restoring(step.states), seeded(0):
        whole = _results(step, step.optimizer, *step(*batch))
    return eager, whole


def _results(step: WholeStep, optimizer: torch.optim.Optimizer, loss: torch.Tensor, norm: torch.Tensor) -> Results:
    found = {"loss": loss, "norm": norm}
    for name, parameter in step.module.named_parameters():
        found[f"parameter {name}"] = parameter
        found |= {f"{key} of {name}": optimizer.state[parameter][key] for key in (*STATE, "step")}
    found |= {f"buffer {name}": buffer for name, buffer in step.module.named_buffers()}
    return {name: shard_of(value).detach().clone() for name, value in found.items()}
