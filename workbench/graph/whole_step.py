"""The whole step as a callable: it trains one step, and updates parameters, buffers and the optimizer in place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch

from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.microbatches import PAIR
from workbench.graph.step_graph import StepGraph
from workbench.graph.update import STATE, Update, scalar_dtype
from workbench.torch_api import aot
from workbench.torch_api.distributed.adamw import ShardedAdamW
from workbench.torch_api.restoring import shard_of


class WholeStep:
    """`step(tokens, targets)` trains one step and returns (loss, norm): scalars on this rank's device, not read yet.

    tokens, targets: this rank's int64 tensors of shape (batch, seq_len), the rows of all microbatches. loss: local to
    the rank. norm: of the whole gradients of all ranks, before clipping. `optimizer` holds the state, which its own
    `step` does not change here. A schedule may set its learning rate between the steps: the graph reads it from a
    tensor.
    """

    def __init__(self, joined: StepGraph, optimizer: torch.optim.Optimizer):
        self.joined, self.optimizer = joined, optimizer
        self.pair, self.module = joined.pair, joined.pair.authored.module
        require_supported(optimizer, joined.update)
        parameters = dict(self.module.named_parameters())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name in joined.trained:
            if id(parameters[name]) not in held:
                raise WorkbenchError(f"{self._where}: the optimizer does not hold parameter {name!r}: give it all "
                                     "parameters of the module")
        self._trained = [parameters[name] for name in joined.trained]
        self._state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
        self._lr: torch.Tensor | None = None
        self._fixed: list[Any] = []
        self._held: list[tuple[str, dict[str, Any], str, torch.Tensor]] = []
        self._shapes: list[list[int]] = []

    @property
    def _where(self) -> str:
        return f"the whole step of {title(self.pair.authored)}"

    @property
    def states(self) -> list[torch.Tensor]:
        """The tensors of the optimizer's state, which a step updates; of shape () or of their parameter."""
        return [value for state in self.optimizer.state.values() for value in state.values()]

    def __call__(self, *batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            loss, norm = self.joined.body(self.inputs(*batch))
        return loss, norm

    def inputs(self, *batch: Any) -> list[Any]:
        """The graph's inputs for this batch, in its order. Raises WorkbenchError as `CompiledStep` does."""
        if self.joined.microbatches == 1:
            self.pair.inputs.require(title(self.pair.authored), batch)
        self.take_state()
        self._take_lr()
        if replaced := next((name for name, table, key, was in self._held if table.get(key) is not was), ""):
            raise WorkbenchError(f"{self._where} reads {replaced!r} at its address in the first step, and it is "
                                 "another tensor now: write into it in place, under torch.no_grad()")
        if not self._fixed:
            self._held = [*self._tensors()]
            self._fixed = list(self._inputs({name: tensor for name, *_, tensor in self._held}))
            if self.joined.microbatches > 1:
                self._shapes = [list(n.meta["val"].shape) for n, value in zip(
                    self.joined.graph.graph.find_nodes(op="placeholder"), self._fixed, strict=True) if value is _BATCH]
        if self._shapes:
            self._require_rows(batch)
        given = iter(batch)
        return [next(given) if value is _BATCH else value for value in self._fixed]

    def _require_rows(self, batch: tuple[Any, ...]) -> None:
        """Refuse a batch of other sizes: the graph would leave out rows, or read a microbatch that is too short."""
        given = [list(getattr(value, "shape", ())) for value in batch]
        if given != self._shapes:
            raise WorkbenchError(f"{self._where} takes a batch of {self.joined.microbatches} microbatches, of shapes "
                                 f"{self._shapes}, and got {given}: give a whole batch")

    def _tensors(self) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
        """Parameters and buffers by name, with the dictionary and key where each is held."""
        for path, part in self.module.named_modules():
            for table in (part._parameters, part._buffers):
                yield from ((f"{path}.{key}".lstrip("."), table, key, held)
                            for key, held in table.items() if held is not None)

    def _inputs(self, held: dict[str, Any]) -> Iterator[Any]:
        states = [shard_of(self._state[p][kind]).detach() for kind in STATE for p in self._trained]
        own = iter([*states, self._state[self._trained[0]]["step"], self._lr])
        for node in self.joined.graph.graph.find_nodes(op="placeholder"):
            name = aot.parameter_of(node)
            if aot.is_state(node):
                yield next(own)
            elif name is None:
                yield _BATCH
            else:
                tensor = isinstance(node.meta["val"], torch.Tensor)
                yield shard_of(held[name]).detach() if tensor else held[name].device_mesh

    def take_state(self) -> None:
        """Make the optimizer's state, or take over what a checkpoint put there, at the addresses that the graph reads.
        """
        found = [self.optimizer.state.get(p) for p in self._trained]
        if self._state and all(f is self._state[p] for f, p in zip(found, self._trained, strict=True)):
            return
        counts = {float(f["step"]) for f in found if f}
        if len(counts) > 1 or (counts and not all(found)):
            raise WorkbenchError(f"{self._where}: the optimizer's parameters have taken {sorted(counts)} steps, and "
                                 "one graph counts them together: load a state of one step")
        device = self.pair.authored.world.device
        made = not self._state
        count = (torch.zeros((), dtype=scalar_dtype("step", device), device=device) if made
                 else self._state[self._trained[0]]["step"])
        count.fill_(counts.pop() if counts else 0.0)
        for parameter, state in zip(self._trained, found, strict=True):
            own = self._state.setdefault(parameter, {})
            own["step"] = count
            for kind in STATE:
                if made:
                    own[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
                if state and state is not own:
                    own[kind].copy_(state[kind])
                elif not state:
                    own[kind].zero_()
            self.optimizer.state[parameter] = own

    def _take_lr(self) -> None:
        """Write the learning rate that the optimizer has now into the tensor that the graph reads."""
        if self._lr is None:
            device = self.pair.authored.world.device
            self._lr = torch.zeros((), dtype=scalar_dtype("lr", device), device=device)
        groups = self.optimizer.param_groups
        if all(group["lr"] is self._lr for group in groups):
            return
        values = [group["lr"] for group in groups]
        for value in values:
            number = isinstance(value, Real | torch.Tensor) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise WorkbenchError(f"{self._where}: the learning rate {value!r} is no number of 0 or more: set "
                                     'optimizer.param_groups[0]["lr"] to one')
        if len({float(value) for value in values}) > 1:
            raise WorkbenchError(f"{self._where}: the optimizer's groups have {len(groups)} learning rates, and one "
                                 f"graph has one: set the same for all, or {PAIR}")
        self._lr.fill_(values[0])
        for group in groups:
            group["lr"] = self._lr

    def close(self) -> None:
        """Free the CUDA graph that the body holds, before the process groups end. May be called twice."""
        close = getattr(self.joined.body, "close", None)
        if close is not None:
            close()

    def __repr__(self) -> str:
        body = "open" if self.joined.body is None else type(self.joined.body).__name__
        return f"WholeStep({title(self.pair.authored)}: {body})"


_BATCH = object()


def require_supported(optimizer: torch.optim.Optimizer, update: Update) -> None:
    """Raise WorkbenchError for an optimizer whose step the graph does not do."""
    if type(optimizer) not in (torch.optim.AdamW, ShardedAdamW):
        raise WorkbenchError(f"the whole step takes torch.optim.AdamW, and was given {type(optimizer).__name__}: take "
                             f"AdamW, or {PAIR}")
    wanted = {"betas": update.betas, "eps": update.eps, "weight_decay": update.weight_decay, "amsgrad": False,
              "maximize": False}
    for group in optimizer.param_groups:
        for key, value in wanted.items():
            if group[key] != value:
                raise WorkbenchError(f"the whole step was joined for AdamW with {key} {value}, and the optimizer has "
                                     f"{group[key]}: give the same to both, or {PAIR}")
