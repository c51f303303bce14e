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
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
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
    """One process's trace of one GPU. rank: None where the job was not distributed."""

    path: Path
    device: str
    rank: int | None
    steps: tuple[TracedStep, ...]


def read_trace(path: Path | str, device: int | None = None) -> TraceFile:
    """Read a trace as `export_chrome_trace` writes it, also with .gz at the end of its name.

    device: the GPU to look at, where the trace holds several. Without marks of steps all events are one step. Raises
    WorkbenchError for what is no such trace, for a truncated one, and for one without events of that GPU.
    """
    path = Path(path)
    with reading(path, "a trace of torch.profiler", EXPORT):
        data = json_of(_text(path))
        spans = [event for event in data["traceEvents"] if event.get("ph") == "X"]
        gpu = [event for event in spans if event.get("cat") in _GPU]
        number = _chosen(path, gpu, device)
        of_device = [event for event in gpu if _device(event) == number]
        names = {about["id"]: str(about["name"]) for about in data.get("deviceProperties", [])}
        rank = data.get("distributedInfo", {}).get("rank")
        return TraceFile(path, names.get(number, f"GPU {number}"), None if rank is None else int(rank),
                         _steps(spans, of_device))


def _text(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"not a whole gzip file: {error}") from None


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


def _steps(spans: Sequence[Event], gpu: Sequence[Event]) -> tuple[TracedStep, ...]:
    calls = {
        event["args"].get("correlation"): event for event in spans if event.get("cat") in _CALLS
    }
    calls.pop(None, None)
    marks = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in spans
                   if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#"))
    marks = marks or [(-inf, inf, "whole trace")]

    def step_at(time: float) -> str:
        i = bisect_right(marks, time, key=lambda mark: mark[0]) - 1
        return marks[i][2] if i >= 0 and time <= marks[i][1] else ""

    events: dict[str, list[GpuEvent]] = defaultdict(list)
    for event in gpu:
        call = calls.get(event["args"].get("correlation"))
        events[step_at((call or event)["ts"])].append(_event(event, call))
    launches = Counter(step_at(call["ts"]) for call in calls.values()
                       if "LaunchKernel" in call["name"] or "GraphLaunch" in call["name"])
    return tuple(TracedStep(name, tuple(sorted(events[name], key=lambda event: event.begin)), launches[name])
                 for name in dict.fromkeys(name for *_, name in marks) if events[name])


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
