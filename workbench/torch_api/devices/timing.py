"""The time of an operator on this machine, measured on tensors of its node's shapes.

Source: torch/_subclasses/fake_tensor.py (`unset_fake_temporarily`: passes run under the capture's fake mode).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

WARMUP, REPEATS = 2, 5


def signature(node: Node) -> str:
    """All that the time depends on: the operator, shapes, strides and dtypes of its tensors, and other arguments."""

    def face(value: Any) -> Any:
        if isinstance(value, Node):
            value = value.meta.get("val")
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}/{list(value.stride())}"
        return [face(v) for v in value] if isinstance(value, list | tuple) else str(value)

    return f"{node.target}({', '.join(map(str, map(face, node.args)))}; {sorted(map(str, node.kwargs.items()))})"


def _real(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made.normal_() if value.dtype.is_floating_point else made.zero_()
    return value


def measured_ms(node: Node, device: torch.device) -> float:
    """The median of a few runs of one operator node after warm-up, in milliseconds. No other rank takes part."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: _real(n.meta.get("val"), device)
        )
        times = []
        for _ in range(WARMUP + REPEATS):
            if device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                node.target(*args, **kwargs)  # type: ignore[operator]
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                started = time.perf_counter()
                node.target(*args, **kwargs)  # type: ignore[operator]
                times.append((time.perf_counter() - started) * 1e3)
    return sorted(times[WARMUP:])[REPEATS // 2]
