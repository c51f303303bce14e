"""One step under torch's profiler: how long kernels ran, and how much of the communication nothing hid."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from workbench.pipeline import gpu_communication as gpu

LONGEST, NAME = 20, 120
_MARK = "workbench: the measured step"
_KIND = re.compile(r"^ncclDevKernel_([A-Za-z]+).*$")


class Kernel(NamedTuple):
    """One kernel of a profile, in microseconds. launched: when the CPU's call for it ended, if the profile has it."""

    name: str
    stream: int
    begin: float
    end: float
    launched: float = float("-inf")


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
        copied = waiting = ""
        if self.copies_ms:
            copied = f" host copies {self.copies_ms:,.1f} ms, {self.exposed_copies_ms:,.1f} ms of it exposed;"
        if self.waiting_ms:
            waiting = f" {gpu.waits_counted(self.waiting_ms)};"
        return (
            f"kernels {self.kernels_ms:,.1f} ms, NCCL {self.nccl_ms:,.1f} ms, {self.exposed_nccl_ms:,.1f} ms of it "
            f"exposed;{copied}{waiting} {self.kernels:,} kernels in {self.launches:,} launches"
        )


def covered(spans: Iterable[gpu.Interval]) -> float:
    """Milliseconds that the (begin, end) spans cover, in µs: where several overlap, the time counts once."""
    return gpu.length(gpu.union(spans)) / 1e3


def step_profile(kernels: Sequence[Kernel], launches: int = 0) -> StepProfile:
    """How long kernels ran that are not NCCL's, NCCL's, and NCCL's alone."""
    nccl: dict[str, list[gpu.Interval]] = {}
    compute, copies, waiting = list[gpu.Interval](), list[gpu.Interval](), list[gpu.Interval]()
    spent: Counter[str] = Counter()
    for kernel in kernels:
        name, span = kernel.name, (kernel.begin, kernel.end)
        spent[name[:NAME]] += (kernel.end - kernel.begin) / 1e3  # type: ignore[assignment]
        if gpu.waits_inside(name):
            waiting.append(span)
        if gpu.host_copy(name):
            copies.append(span)
        elif gpu.kind_of(name) != gpu.COMPUTE:
            nccl.setdefault(_KIND.sub(r"\1", name), []).append(span)
        else:
            compute.append(span)

    def exposed(spans: Sequence[gpu.Interval]) -> float:
        return covered([*spans, *compute]) - covered(compute)

    every = [span for spans in nccl.values() for span in spans]
    return StepProfile(
        covered(compute),
        covered(every),
        exposed(every),
        len(kernels),
        launches,
        {kind: exposed(spans) for kind, spans in nccl.items()},
        dict(spent.most_common(LONGEST)),
        covered(copies),
        exposed(copies),
        covered(waiting),
    )


def since(events: Sequence[Any], mark: str) -> list[Any]:
    """The events of a profile from the range called `mark` on, without the range itself."""
    begin = max(
        e.time_range.start for e in events if e.name == mark and e.device_type == DeviceType.CPU
    )
    return [e for e in events if e.name != mark and e.time_range.start >= begin]


def profiled(step: Callable[[], Any]) -> tuple[list[Kernel], int]:
    """Run `step` twice, the second time measured: its kernels, and the number of calls that launched them.

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
    calls = [e for e in events if "LaunchKernel" in e.name or "GraphLaunch" in e.name]
    launched = {call.id: call.time_range.end for call in calls}  # a kernel has the id of its call
    kernels = [Kernel(e.name, int(e.device_resource_id), e.time_range.start, e.time_range.end,
                      launched.get(e.id, float("-inf")))
               for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return kernels, len(calls)
