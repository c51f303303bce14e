"""One step under torch's profiler: how long kernels ran, and how much of the communication nothing hid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from workbench.pipeline.gpu_communication import (
    COMPUTE,
    Interval,
    host_copy,
    kind_of,
    length,
    union,
    waits_counted,
    waits_inside,
)
from workbench.torch_api.restoring import restoring_module

LONGEST, NAME = 20, 120
_MARK = "workbench: the measured step"
_KIND = re.compile(r"^ncclDevKernel_([A-Za-z]+).*$")


@dataclass(frozen=True)
class StepProfile:
    """One step of one rank's GPU, in milliseconds. nccl_ms: communication, also by peer copies and symmetric memory.

    launches: calls that start kernels; a CUDA graph's is one.

    exposed_by: what would be exposed if this kind of collective were the only one, by the name of NCCL's kernel.
    longest: the kernels, by name, that take most of all, with their time together. copies_ms: copies to pinned host
    memory and back; exposed_copies_ms: those that no compute hides. waiting_ms: of kernels_ms, products that wait for
    other ranks inside their kernels, with their waits.
    """

    kernels_ms: float
    nccl_ms: float
    exposed_nccl_ms: float
    kernels: int
    launches: int = 0
    exposed_by: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    copies_ms: float = 0.0
    exposed_copies_ms: float = 0.0
    waiting_ms: float = 0.0

    def __str__(self) -> str:
        copied = (
            f" host copies {self.copies_ms:,.1f} ms, {self.exposed_copies_ms:,.1f} ms of it exposed;"
            if self.copies_ms
            else ""
        )
        copied += f" {waits_counted(self.waiting_ms)};" if self.waiting_ms else ""
        return (
            f"kernels {self.kernels_ms:,.1f} ms, NCCL {self.nccl_ms:,.1f} ms, {self.exposed_nccl_ms:,.1f} ms of it "
            f"exposed;{copied} {self.kernels:,} kernels in {self.launches:,} launches"
        )


def covered(spans: Iterable[Interval]) -> float:
    """The time that the (begin, end) spans cover: where several overlap, it counts once."""
    return length(union(spans))


def step_profile(kernels: Sequence[tuple[str, float, float]], launches: int = 0) -> StepProfile:
    """From (name, start, end) of each kernel, in µs: kernels that are not NCCL's, NCCL's, and NCCL's alone."""
    nccl: dict[str, list[Interval]] = {}
    compute, copies = list[Interval](), list[Interval]()
    spent: Counter[str] = Counter()
    for name, begin, end in kernels:
        spent[name[:NAME]] += (end - begin) / 1e3  # type: ignore[assignment]
        if host_copy(name):
            copies.append((begin, end))
        elif kind_of(name) != COMPUTE:
            nccl.setdefault(_KIND.sub(r"\1", name), []).append((begin, end))
        else:
            compute.append((begin, end))
    busy = covered(compute)
    every = [span for spans in nccl.values() for span in spans]
    exposed = {kind: (covered(spans + compute) - busy) / 1e3 for kind, spans in nccl.items()}
    return StepProfile(busy / 1e3, covered(every) / 1e3, (covered(every + compute) - busy) / 1e3, len(kernels),
                       launches, exposed, dict(spent.most_common(LONGEST)), covered(copies) / 1e3,
                       (covered(copies + compute) - busy) / 1e3,
                       covered((begin, end) for name, begin, end in kernels if waits_inside(name)) / 1e3)


def since(events: Sequence[Any], mark: str) -> list[Any]:
    """The events of a profile from the range called `mark` on, without the range itself."""
    begin = max(
        e.time_range.start for e in events if e.name == mark and e.device_type == DeviceType.CPU
    )
    return [e for e in events if e.name != mark and e.time_range.start >= begin]


def profiled(step: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """Run `step` twice, the second time measured: events of its kernels, and of the calls that launched them.

    A kernel and its call have one `id`.

    The first run under the profiler pays for its start, which takes each rank another time: NCCL's kernels would
    wait for the slowest rank, and that would count as exposed. Needs a CUDA device.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
        with record_function(_MARK):
            step()
            torch.cuda.synchronize()
    events = since(seen.events() or [], _MARK)
    launches = [e for e in events if "LaunchKernel" in e.name or "GraphLaunch" in e.name]
    return [
        e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ], launches


def profile_of(step: Callable[[], Any]) -> StepProfile:
    """Run `step` twice, the second time profiled. Needs a CUDA device."""
    kernels, launches = profiled(step)
    return step_profile(
        [(e.name, e.time_range.start, e.time_range.end) for e in kernels], len(launches)
    )


def profile_step(
    step: Callable[[], Any], module: torch.nn.Module, written: Collection[str] = ()
) -> StepProfile:
    """Run `step` twice, the second time profiled; every rank calls it. Needs a CUDA device.

    The module's gradients are dropped before each run: a replayed step refuses to write over gradients that are held.
    Otherwise it stays as it was: see `restoring_module`, also for `written`.
    """

    def once() -> None:
        module.zero_grad(set_to_none=True)
        step()

    module.zero_grad(set_to_none=True)
    with restoring_module(module, written):
        return profile_of(once)
