"""One step as a GPU ran it, in the same form as a simulated one."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.graph.lower import CompiledStep, Step
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.simulated_run import (
    BEHIND_OTHERS,
    COMPUTE,
    CPU_LATE,
    HIDDEN,
    Span,
    StepTimeline,
    simulated,
)
from workbench.pipeline import gpu_communication as gpu
from workbench.pipeline.step_profile import Kernel, profiled
from workbench.torch_api.restoring import restoring, restoring_module

_KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce",
          "all_to_all": "SendRecv", "broadcast": "Broadcast"}
_ALONE = "nothing computes meanwhile"
START_US = 3.0
"""From the end of a launching call to its kernel's begin: 95 % of those that find an H200 idle, in the traces of
benchmarks/results/traces_h200.
"""
_NCCL = re.compile(r"^ncclDevKernel_([A-Za-z]+?)(?:_|\(|$)")


def measured(step: Callable[[], Any], pair_or_step: ForwardBackward | Step) -> StepTimeline:
    """Run `step` (forward and backward of a pair, or all of a step, and no other collective) on this rank's GPU,
    profiled.

    Every rank calls it, after warm-up; the step runs twice, and the second run counts. Each process group has a stream
    of its own, whose NCCL kernels are matched with the group's collectives in their order. The module, and the states
    that a step updates, are unchanged afterwards.
    """
    run = pair_or_step if isinstance(pair_or_step, Step) else CompiledStep(pair_or_step)
    with restoring_module(run.module, run.written), restoring(run.states):
        kernels, _ = profiled(step)
    return run_of_kernels(kernels, run.split.by_part, f"measured on {torch.cuda.get_device_name()}")


def _moves(kernel: Kernel) -> bool:
    """Whether the kernel is a collective, or a copy to or from the host."""
    return gpu.kind_of(kernel.name) != gpu.COMPUTE or gpu.host_copy(kernel.name)


def _kind(collective: Kernel | Span) -> str:
    """NCCL's name for what a kernel or a graph's collective does, or else the kernel's own name."""
    if isinstance(collective, Span):
        kind = collective.label.split(" ", 1)[0]
        return _KINDS.get(kind, kind)
    if gpu.host_copy(collective.name):
        return "to_host" if "DtoH" in collective.name else "to_device"
    return m[1] if (m := _NCCL.match(collective.name)) else collective.name


def _match(nccl: Sequence[Kernel], lanes: dict[str, list[Span]]) -> dict[Kernel, Span]:
    """The collective of each kernel for which there is no doubt. A group runs its collectives in their order.

    A group is known by the kinds on its stream. A replayed CUDA graph spreads a group over several streams: there, a
    kind that only one group has is matched. Groups with the same collectives cannot be told apart.
    """
    matches: dict[Kernel, Span] = {}
    streams: dict[int, list[Kernel]] = {}
    for kernel in nccl:
        streams.setdefault(kernel.stream, []).append(kernel)
    for kernels in streams.values():
        fits = [
            spans for spans in lanes.values()
            if list(map(_kind, spans)) == list(map(_kind, kernels))
        ]
        if len(fits) == 1:
            matches |= dict(zip(kernels, fits[0], strict=True))
    for kind in dict.fromkeys(map(_kind, nccl)):
        kernels = [k for k in nccl if _kind(k) == kind]
        spans = [s for lane in lanes.values() for s in lane if _kind(s) == kind]
        if (
            len({s.lane for s in spans}) == 1
            and len(kernels) == len(spans)
            and not matches.keys() & kernels
        ):
            matches |= dict(zip(kernels, spans, strict=True))
    return matches


def run_of_kernels(
    kernels: Sequence[Kernel], graphs: dict[str, GraphModule], source: str
) -> StepTimeline:
    """The profile as a StepTimeline. A collective counts as hidden where compute covers 95 % of it. Otherwise its limit
    says whether the CPU launched the compute that follows too late to begin before the middle of it, or whether
    compute waits for other communication that ends later.

    A kernel that fits no process group gets a lane of its stream, named by the stream's number.
    """
    start = min((k.begin for k in kernels), default=0.0)
    nccl = sorted((k for k in kernels if _moves(k)), key=lambda k: k.begin)
    compute = [k for k in kernels if not _moves(k)]
    busy = gpu.union((k.begin, k.end) for k in compute)
    spans = [Span(k.name, COMPUTE, (k.begin - start) / 1e3, (k.end - start) / 1e3) for k in compute]
    lanes: dict[str, list[Span]] = {}
    for span in simulated(graphs).collectives:
        lanes.setdefault(span.lane, []).append(span)
    matched = _match(nccl, lanes)
    compute.sort(key=lambda k: k.begin)
    for k, waited in zip(nccl, gpu.waited_for(busy, [(k.begin, k.end) for k in nccl]), strict=True):
        alone = (k.end - k.begin - gpu.overlap(busy, k.begin, k.end)) / 1e3
        little = gpu.NEGLIGIBLE * (k.end - k.begin)
        known = matched.get(k, Span(k.name, f"stream {k.stream}", 0.0, 0.0))
        after = bisect(compute, k.begin, key=lambda c: c.begin)
        following = compute[after].launched if after < len(compute) else float("-inf")
        limit = CPU_LATE if following + START_US > (k.begin + k.end) / 2 else _ALONE
        if limit == _ALONE and waited < little:
            limit = BEHIND_OTHERS
        spans.append(
            Span(
                known.name,
                known.lane,
                (k.begin - start) / 1e3,
                (k.end - start) / 1e3,
                alone,
                HIDDEN if alone * 1e3 < little else limit,
                known.label,
                known.part,
                alone - waited / 1e3,
            )
        )
    end = max((k.end for k in kernels), default=start)
    return StepTimeline(source, tuple(spans), (end - start) / 1e3, gpu.length(busy) / 1e3)
