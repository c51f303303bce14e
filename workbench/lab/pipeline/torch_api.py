"""Descriptors of the values that stages send each other, and schedules from each rank's own list of computations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.distributed.pipelining import schedules

RECEIVED = 1000
"""The descriptors of what stages pass on have numbers from here on, and those of the batch's tensors from 0 on."""


def received(number: int) -> Any:
    """The descriptor of a forward value that a stage receives."""
    return PlainAOTInput(number)


def sent(number: int) -> Any:
    return PlainAOTOutput(number)


def received_gradient(number: int) -> Any:
    return TangentAOTInput(PlainAOTOutput(number))


def sent_gradient(number: int) -> Any:
    return GradAOTOutput(PlainAOTInput(number))


def is_sent_gradient(desc: Any) -> bool:
    """Whether an output is the gradient of an input that is neither a parameter nor a buffer."""
    return isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, PlainAOTInput)


def in_order(orders: Sequence[str]) -> type:
    """A schedule that runs each rank's computations in this order, in torch's notation: "0F0 0F1 0I0 0W0"."""

    class InOrder(schedules._PipelineScheduleRuntime):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            rows = [list(map(schedules._Action.from_str, row.split())) for row in orders]
            self._prepare_schedule_with_comms(dict(enumerate(rows)))

    return InOrder
