"""One step under torch's profiler: how long kernels ran, and how much of NCCL nothing hid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class StepProfile:
    """One step of one rank's GPU, in milliseconds. launches: calls that start kernels; a CUDA graph's is one."""

    kernels_ms: float
    nccl_ms: float
    exposed_nccl_ms: float
    kernels: int
    launches: int = 0

    def __str__(self) -> str:
        return (f"kernels {self.kernels_ms:,.1f} ms, NCCL {self.nccl_ms:,.1f} ms, {self.exposed_nccl_ms:,.1f} ms of it "
                f"exposed; {self.kernels:,} kernels in {self.launches:,} launches")


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def step_profile(kernels: Sequence[tuple[str, float, float]], launches: int = 0) -> StepProfile:
    """From (name, start, end) of each kernel, in µs: kernels that are not NCCL's, NCCL's, and NCCL's alone."""
    nccl = [(a, b) for name, a, b in kernels if "nccl" in name.lower()]
    compute = [(a, b) for name, a, b in kernels if "nccl" not in name.lower()]
    alone = covered(nccl + compute) - covered(compute)
    return StepProfile(covered(compute) / 1e3, covered(nccl) / 1e3, alone / 1e3, len(kernels), launches)


def profile_step(step: Callable[[], Any]) -> StepProfile:
    """Run `step` once, profiled; every rank calls it. Needs a CUDA device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    events = seen.events() or []
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events
             if e.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum("LaunchKernel" in e.name or "GraphLaunch" in e.name for e in events)
    return step_profile(spans, launches)
