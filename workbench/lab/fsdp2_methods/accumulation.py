"""Gradients that add up on each rank while `set_requires_gradient_sync(False)` is on, and are reduced once.

Like FSDP2: its gathered parameters are leaves of autograd, whose gradients it adds in the dtype of the reduction.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from workbench.authoring.adopt import AdoptedUnit, UnitGather
from workbench.authoring.plans import AuthoringError
from workbench.authoring.simple_fsdp import GATHERS, Gather, Precision
from workbench.lab.fsdp2_methods.torch_api import after_backward
from workbench.torch_api.distributed.fsdp2 import FSDPParameter


class Accumulated:
    """Takes the place of a parameter's Gather: reads get the gathered parameter as it was at the start, a leaf.

    total: of the gradients so far, in the dtype of the reduction.
    """

    def __init__(self, parameter: FSDPParameter, gather: UnitGather, window: Window) -> None:
        self.parameter, self.gather, self.window = parameter, gather, window
        self.total: torch.Tensor | None = None
        self.version = _version(parameter.shard)
        with torch.no_grad():
            whole = gather(parameter.shard)
        self.leaf = whole.detach().requires_grad_(parameter.shard.requires_grad)
        if self.leaf.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(window.note)

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        return self.leaf

    def put(self, gather: Accumulated | Gather) -> None:
        for module, name in self.parameter.owners:
            module.__dict__[GATHERS][name] = gather

    def add(self) -> None:
        grad, self.leaf.grad = self.leaf.grad, None
        if grad is not None:
            grad = grad.to(self.parameter.reduce)
            self.total = grad if self.total is None else self.total + grad

    def reduce(self) -> None:
        """The sum goes back through a gather in the dtype of the reduction, and so to the shard's gradient."""
        if self.total is not None:
            dtype = self.parameter.reduce
            gather = replace(self.gather, precision=Precision(dtype, dtype))
            with torch.enable_grad():  # autograd calls back without
                gather(self.parameter.shard).backward(self.total)


def _version(shard: Any) -> int:
    """Writes so far, through the DTensor or its local tensor."""
    return int(shard._version + shard.to_local()._version)


class Window:
    """From `set_requires_gradient_sync(False)` to the end of the first backward after `...(True)`, for one unit.

    together: the windows that were opened with it, which end as one.
    """

    def __init__(self, unit: AdoptedUnit, together: list[Window]) -> None:
        self.unit, self.together = unit, together
        self.last, self.waiting = False, False
        self.parameters: list[Accumulated] = []
        for parameter in unit.parameters:
            module, name = parameter.owners[0]
            self.parameters.append(Accumulated(parameter, module.__dict__[GATHERS][name], self))
        for accumulated in self.parameters:
            accumulated.put(accumulated)
        together.append(self)

    def require_same(self) -> None:
        """AuthoringError where the parameters are no longer those that were gathered."""
        for accumulated in self.parameters:
            if _version(accumulated.parameter.shard) != accumulated.version:
                raise AuthoringError(
                    f"parameter {accumulated.parameter.name} has changed since set_requires_gradient_sync(False), and "
                    "the microbatches since then read its old values: call that after optimizer.step()"
                )

    def note(self, leaf: torch.Tensor) -> None:
        """A gradient has arrived."""
        first = self.together[0]
        if not first.waiting:
            first.waiting = True
            after_backward(first.end)

    def end(self) -> None:
        """A backward has ended, which also units took part in that it gave no gradient."""
        self.waiting = False
        for window in list(self.together):
            window.close()

    def close(self) -> None:
        for accumulated in self.parameters:
            accumulated.add()
        if self.last:
            open_windows.pop(self.unit)
            for accumulated in self.parameters:
                accumulated.put(accumulated.gather)
                accumulated.reduce()


open_windows: WeakKeyDictionary[AdoptedUnit, Window] = WeakKeyDictionary()


def set_sync(units: list[AdoptedUnit], sync: bool) -> None:
    """FSDP2's `set_requires_gradient_sync` for these units."""
    together: list[Window] = []
    for unit in units:
        if unit in open_windows:
            open_windows[unit].require_same()
            open_windows[unit].last = sync
        elif not sync:
            open_windows[unit] = Window(unit, together)
