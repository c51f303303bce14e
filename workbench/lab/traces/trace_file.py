"""Read a trace of torch.profiler: the events of one GPU, by step, each with the time at which the CPU launched it."""

from __future__ import annotations

import gzip
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.pipeline.gpu_communication import kind_of
from workbench.recipe.files import json_of, reading

NAME = 20
"""Letters of a process group's name that are kept: some are hashes."""
EXPORT = "export one with prof.export_chrome_trace(path), after the profiler has stopped"
_GPU = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
_CALLS = ("cuda_runtime", "cuda_driver", "runtime")
"""Categories in lower case: torch before 1.12 wrote Kernel, Memcpy, Memset and Runtime."""
CLOCKS_US = 1e6
"""The clocks of CPU and GPU differ by less: what begins longer before its launch has no usable time."""
_SIZES = {"In msg nelems": " elements", "dtype": "", "Group size": " ranks"}
Event = Mapping[str, Any]


@dataclass(frozen=True)
class GpuEvent:
    """A kernel, copy or fill. begin, end: microseconds. launched: when the CPU's call ended; None where unknown.

    kind: see `kind_of`. graph: whether a CUDA graph launched it. about, group: what the trace says of a collective, and
    of its process group.
    """

    name: str
    kind: str
    stream: int
    begin: float
    end: float
    launched: float | None = None
    graph: bool = False
    about: str = ""
    group: str = ""


@dataclass(frozen=True)
class TracedStep:
    """One step's events in order of their begin. launches: calls that start kernels; a CUDA graph's is one."""

    name: str
    events: tuple[GpuEvent, ...] = field(repr=False)
    launches: int = 0


@dataclass(frozen=True)
class TraceFile:
    """One process's trace of one GPU. rank: None where the job was not distributed; world_size is 1 there.

    ran: when its first step began and its last one ended, in microseconds of the host's clock. left_out: the events in
    no step, in order, since the trace does not hold their launch, or they begin long before it.
    """

    path: Path
    device: str
    rank: int | None
    world_size: int
    ran: tuple[float, float]
    steps: tuple[TracedStep, ...]
    left_out: tuple[GpuEvent, ...] = ()


def read_trace(path: Path | str, device: int | None = None) -> TraceFile:
    """Read a trace as `export_chrome_trace` writes it, also with .gz at the end of its name.

    device: the GPU to look at, where the trace holds several. Without marks of steps all events are one step. What ran
    on a stream before the first kernel that the trace saw launched was left running by the warm-up, and is in no step.
    Raises WorkbenchError for what is no such trace, for a truncated one, and for one without events of that GPU.
    """
    path = Path(path)
    with reading(path, "a trace of torch.profiler", EXPORT):
        data = json_of(_text(path))
        spans = [event for event in data["traceEvents"] if event.get("ph") == "X"]
        gpu = [event for event in spans if _category(event) in _GPU]
        number = _chosen(path, gpu, device)
        of_device = [event for event in gpu if _device(event) == number]
        names = {about["id"]: str(about["name"]) for about in data.get("deviceProperties", [])}
        job = data.get("distributedInfo", {})
        rank = int(job["rank"]) if "rank" in job else None
        steps, left_out = _steps(spans, of_device)
        start = data.get("baseTimeNanoseconds", 0) / 1e3
        times = [time + start for step in steps for e in step.events for time in (e.begin, e.end)]
        return TraceFile(
            path, names.get(number) or f"GPU {number}", rank, int(job.get("world_size", 1)),
            (min(times, default=0.0), max(times, default=0.0)), steps, left_out,
        )


def _text(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"not a whole gzip file: {error}") from None


def _category(event: Event) -> str:
    return str(event.get("cat", "")).lower()


def _device(event: Event) -> int:
    return int(event["args"].get("device", 0))


def _chosen(path: Path, gpu: Sequence[Event], device: int | None) -> int:
    devices = sorted(set(map(_device, gpu)))
    listed = ", ".join(map(str, devices))
    if not devices:
        raise WorkbenchError(
            f"{path}: no event of a GPU (category kernel): profile with ProfilerActivity.CUDA on a "
            f"machine with a GPU, and {EXPORT}"
        )
    if device is None and len(devices) > 1:
        raise WorkbenchError(f"{path}: holds GPUs {listed}: choose one with --device")
    if device is not None and device not in devices:
        raise WorkbenchError(f"{path}: holds no GPU {device}: it holds {listed}")
    return devices[0] if device is None else device


def _steps(
    spans: Sequence[Event], gpu: Sequence[Event]
) -> tuple[tuple[TracedStep, ...], tuple[GpuEvent, ...]]:
    """The steps, and the events that belong to none although they ran meanwhile."""
    calls = {event["args"].get("correlation"): event for event in spans if _category(event) in _CALLS}
    calls.pop(None, None)
    marks = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in spans
                   if event["name"].startswith("ProfilerStep#") and not _category(event).startswith("gpu"))
    marks = marks or [(-inf, inf, "whole trace")]

    def step_at(time: float) -> str:
        i = bisect_right(marks, time, key=lambda mark: mark[0]) - 1
        return marks[i][2] if i >= 0 and time <= marks[i][1] else ""

    events: dict[str, list[GpuEvent]] = defaultdict(list)
    left_out = []
    launched_on: set[int] = set()
    for event in sorted(gpu, key=lambda event: event["ts"]):
        call = calls.get(event["args"].get("correlation"))
        read = _event(event, call)
        left_running = call is None and bool(calls) and read.stream not in launched_on
        untimed = call is not None and call["ts"] - read.begin > CLOCKS_US
        if left_running or untimed:
            left_out.append(read)
            continue
        if call is not None:
            launched_on.add(read.stream)
        events[step_at((call or event)["ts"])].append(read)
    launches = Counter(step_at(call["ts"]) for call in calls.values()
                       if "LaunchKernel" in call["name"] or "GraphLaunch" in call["name"])
    names = dict.fromkeys(name for *_, name in marks)
    steps = [TracedStep(name, tuple(events[name]), launches[name]) for name in names if events[name]]
    return tuple(steps), tuple(left_out)


def _event(event: Event, call: Event | None) -> GpuEvent:
    args = event["args"]
    about = ""
    if args.get("Collective name"):
        sizes = [f"{args[key]}{unit}" for key, unit in _SIZES.items() if key in args]
        about = ", ".join([args["Collective name"], *sizes])
    begin = float(event["ts"])
    launched = None if call is None else float(call["ts"] + call["dur"])
    return GpuEvent(event["name"], kind_of(event["name"]), int(args.get("stream", event.get("tid", 0))), begin,
                    begin + float(event["dur"]), launched, call is not None and "GraphLaunch" in call["name"], about,
                    _group(args))


def _group(args: Event) -> str:
    """The description of the process group, which names a mesh's axis, or its name; "" where the trace has neither."""
    for key in ("Description", "Name"):
        text = str(args.get(f"Process Group {key}", "")).strip('"')
        if text not in ("", "undefined"):
            return text.removeprefix("mesh_")[:NAME]
    return ""
