"""One step as a GPU ran it, in the same form as a simulated one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.simulated_run import COMPUTE, HIDDEN, Span, StepTimeline, simulated
from workbench.pipeline import gpu_communication as gpu
from workbench.pipeline.step_profile import profiled
from workbench.torch_api.unchanged import unchanged

_KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce",
          "all_to_all": "SendRecv", "broadcast": "Broadcast"}
_ALONE = "nothing computes meanwhile"
_NCCL = re.compile(r"^ncclDevKernel_([A-Za-z]+?)(?:_|\(|$)")


class Kernel(NamedTuple):
    """One kernel of a profile; begin and end in microseconds."""

    name: str
    stream: int
    begin: float
    end: float


def measured(step: Callable[[], Any], pair: ForwardBackward) -> StepTimeline:
    """Run `step` (forward and backward of this pair, and no other collective) on this rank's GPU, profiled.

    Every rank calls it, after warm-up; the step runs twice, and the second run counts. Each process group has a stream
    of its own, whose NCCL kernels are matched with the group's collectives in their order. The module is unchanged
    afterwards. Raises WorkbenchError without a GPU.
    """
    if not torch.cuda.is_available():
        raise WorkbenchError("a timeline is measured on a GPU, and there is none here: simulated(...) estimates one")
    with unchanged(pair.authored.module, pair.written):
        events = profiled(step)[0]
    kernels = [Kernel(e.name, int(e.device_resource_id), e.time_range.start, e.time_range.end) for e in events]
    return run_of_kernels(kernels, pair.by_part, f"measured on {torch.cuda.get_device_name()}")


def run_of_kernels(kernels: Sequence[Kernel], graphs: dict[str, GraphModule], source: str) -> StepTimeline:
    """The profile as a StepTimeline. A collective counts as hidden where compute covers 95 % of it.

    A stream whose kernels fit no process group gets a lane of its own, named by its number.
    """
    start = min((k.begin for k in kernels), default=0.0)
    nccl = sorted((k for k in kernels if gpu.kind_of(k.name) != gpu.COMPUTE), key=lambda k: k.begin)
    compute = [k for k in kernels if gpu.kind_of(k.name) == gpu.COMPUTE]
    busy = gpu.union((k.begin, k.end) for k in compute)
    spans = [Span(k.name, COMPUTE, (k.begin - start) / 1e3, (k.end - start) / 1e3) for k in compute]
    lanes: dict[str, list[tuple[str, Span]]] = {}
    for span in simulated(graphs).collectives:
        lanes.setdefault(span.lane, []).append((span.label.split(" ", 1)[0], span))
    streams: dict[int, list[Kernel]] = {}
    for kernel in nccl:
        streams.setdefault(kernel.stream, []).append(kernel)
    for stream, own in streams.items():
        kinds = [m[1] if (m := _NCCL.match(k.name)) else k.name for k in own]
        fits = [lane for lane, found in lanes.items() if [_KINDS.get(kind, kind) for kind, _ in found] == kinds]
        lane = fits[0] if len(fits) == 1 else None  # groups with the same collectives cannot be told apart
        known = [span for _, span in lanes[lane]] if lane is not None else []
        for i, k in enumerate(own):
            alone = (k.end - k.begin - gpu.overlap(busy, k.begin, k.end)) / 1e3
            name, part, label = (known[i].name, known[i].part, known[i].label) if known else (k.name, "", "")
            spans.append(Span(name, lane or f"stream {stream}", (k.begin - start) / 1e3, (k.end - start) / 1e3,
                              alone, HIDDEN if alone * 1e3 < 0.05 * (k.end - k.begin) else _ALONE, label, part))
    end = max((k.end for k in kernels), default=start)
    return StepTimeline(source, tuple(spans), (end - start) / 1e3, gpu.length(busy) / 1e3)
