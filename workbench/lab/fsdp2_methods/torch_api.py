"""Private names of autograd that FSDP2's methods need."""

from __future__ import annotations

from collections.abc import Callable

import torch


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)
