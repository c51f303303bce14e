"""The whole step as a callable: it trains one step, and updates parameters, buffers and the optimizer in place."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.lower import Step
from workbench.graph.partition import ForwardBackward, Split
from workbench.graph.read.nodes import described
from workbench.lab.whole_step.join import PAIR, StepGraph, Update, join, require_joinable
from workbench.pipeline.stages import PairStep
from workbench.pipeline.train import optimizer_of
from workbench.recipe.recipe import Recipe
from workbench.torch_api import aot
from workbench.torch_api.distributed.adamw import STATE, scalar_dtype
from workbench.torch_api.inductor import lowering
from workbench.torch_api.restoring import shard_of


class WholeStep(Step):
    """`step(tokens, targets)` trains one step and returns (loss, norm): scalars on this rank's device, not read yet.

    tokens, targets: this rank's int64 tensors of shape (batch, seq_len). loss: local to the rank. norm: of the whole
    gradients of all ranks, before clipping. `optimizer` holds the state, which its own `step` does not change here.
    Each call follows its learning rate and its state, and raises WorkbenchError where another option has changed.
    """

    def __init__(self, joined: StepGraph, optimizer: torch.optim.Optimizer):
        super().__init__(joined)
        self.optimizer: torch.optim.Optimizer = optimizer
        self._where = f"the whole step of {title(self.pair.authored)}"
        parameters, device = dict(self.module.named_parameters()), self.pair.authored.world.device
        self._lr, self._count = (torch.zeros((), dtype=scalar_dtype(name, device), device=device)
                                 for name in ("lr", "step"))
        self._state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        for name in joined.trained:
            states = {kind: torch.zeros_like(parameters[name]).detach() for kind in STATE}
            self._state[parameters[name]] = {"step": self._count, **states}
        self._state_tensors = [tensor for state in self._state.values() for tensor in state.values()]
        shards = [shard_of(state[kind]) for kind in STATE for state in self._state.values()]
        self.states = [*shards, self._count, self._lr]  # in the order in which the graph takes them
        self.joined, self.written = joined, joined.trained
        self._require_optimizer(parameters)
        self._take_state()

    def __call__(self, *batch: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            body: Any = self.joined.slots[0].body
            return tuple(body(self.inputs(*batch)))

    def inputs(self, *batch: Any) -> list[Any]:
        """The graph's inputs for this batch, in its order. Raises WorkbenchError as `CompiledStep` does."""
        self.pair.inputs.require(title(self.pair.authored), batch)
        tensors: dict[str, Any] = dict(self.module.named_parameters(remove_duplicate=False))
        self._require_optimizer(tensors)
        self._take_state()
        self._take_lr()
        tensors |= self.module.named_buffers(remove_duplicate=False)
        states, values, inputs = iter(self.states), iter(batch), list[Any]()
        for node in self.joined.graph.graph.find_nodes(op="placeholder"):
            name = aot.parameter_of(node)
            if aot.is_state(node):
                inputs.append(next(states))
            elif name is None:
                inputs.append(next(values))
            elif isinstance(node.meta["val"], torch.Tensor):
                inputs.append(shard_of(tensors[name]).detach())
            else:
                inputs.append(tensors[name].device_mesh)
        return inputs

    def _require_optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise WorkbenchError for an optimizer whose step the graph does not do, or that trains other parameters."""
        kind, ids = type(self.optimizer).__name__, set[int]()
        for group in self.optimizer.param_groups:
            ids.update(map(id, group["params"]))
            for key in ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"):
                value = getattr(self.joined.update, key, False)
                if group.get(key) != value:
                    raise WorkbenchError(f"the whole step was joined for AdamW with {key} {value}, and this {kind} has "
                                         f"{group.get(key)}: give the same to both, or {PAIR}")
        for name, parameter in zip(self.joined.trained, self._state, strict=True):
            if id(parameter) not in ids or parameters[name] is not parameter:
                raise WorkbenchError(f"{self._where}: the optimizer does not hold parameter {name!r} of the module: "
                                     "give it all parameters, and make the step again")

    def _take_state(self) -> None:
        """Take over what is new in the optimizer's state, at the addresses that the graph reads."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self._state]
        now = [state.get(key) for state in states for key in ("step", *STATE)]
        if all(map(operator.is_, now, self._state_tensors)):
            return
        counts = {float(state.get("step", 0.0)) for state in states}
        if len(counts) > 1:
            raise WorkbenchError(f"{self._where}: the optimizer's parameters have taken {sorted(counts)} steps, and "
                                 "one graph counts them together: load a state of one step")
        self._count.fill_(counts.pop())
        for name, state, (parameter, ours) in zip(self.joined.trained, states, self._state.items(), strict=True):
            for kind in STATE:
                new, old = described(state.get(kind)), described(ours[kind])
                if not state:
                    ours[kind].zero_()
                elif new != old:
                    raise WorkbenchError(f"{self._where}: {kind} of parameter {name!r} is {new} in the optimizer's "
                                         f"state, and {old} in the graph: load the state of an AdamW of this module")
                elif state[kind] is not ours[kind]:
                    ours[kind].copy_(state[kind])
            self.optimizer.state[parameter] = dict(ours)

    def _take_lr(self) -> None:
        """Write the learning rate that the optimizer has now into the tensor that the graph reads."""
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        if any(lr is not lrs[0] for lr in lrs) and len(set(map(float, lrs))) > 1:
            raise WorkbenchError(f"{self._where}: the optimizer's groups have {len(lrs)} learning rates, and one graph "
                                 f"has one: set the same for all, or {PAIR}")
        self._lr.fill_(lrs[0])


class Whole(PairStep):
    """`training.step = "whole"`. optimizer: the one that the step takes over, or None for that of the recipe."""

    require = staticmethod(require_joinable)

    def __init__(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.optimizer = optimizer

    def join(self, recipe: Recipe, pair: ForwardBackward) -> Split:
        decomposed = any(spec.name == "inductor_decomposition" for spec in recipe.joint_passes)
        table = lowering.decomposition_table() if decomposed else None
        update = Update(recipe.training.clip, recipe.training.nan_norm == "skip")
        if self.optimizer is not None:
            group = self.optimizer.param_groups[0]
            update = replace(update, **{key: group[key] for key in ("betas", "eps", "weight_decay")})
        return join(pair, update, decompositions=table)

    def step(self, split: Any) -> WholeStep:
        return WholeStep(split, self.optimizer or optimizer_of(split.pair.authored))

    def numbers(self, split: Any) -> dict[str, Any]:
        return {"trained": split.trained, "update": split.update}

    def restored(self, pair: ForwardBackward, numbers: Mapping[str, Any]) -> Split:
        joined = StepGraph(pair.slots[:1], pair, gradients={}, **numbers)
        joined.facts = pair.facts
        return joined
