"""Read a trace of torch.profiler: the events of one GPU, by step, each with the time at which the CPU launched it."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.pipeline.gpu_communication import kind_of
from workbench.recipe.files import regular

NAME = 20
"""Letters of a process group's name that are kept: some are hashes."""
LATEST = 1e18
"""Microseconds: a time beyond is none of a clock's."""
MOST_BYTES = 1 << 30
"""The largest trace that is read; Python needs about ten times as much memory."""
EXPORT = "export one with torch.profiler's prof.export_chrome_trace(path)"
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


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
    WorkbenchError for what is no such trace, truncated, larger than MOST_BYTES, or without GPU events.
    """
    path = Path(path)
    data = _parsed(path)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise WorkbenchError(f"{path}: no list of traceEvents, so this is no trace: {EXPORT}")
    spans = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _is_timed(e)]
    gpu = [e for e in spans if e.get("cat") in _GPU]
    if not gpu:
        raise WorkbenchError(f"{path}: {len(spans):,} events, and none of a GPU (category kernel): profile with "
                             f"ProfilerActivity.CUDA on a machine with a GPU, and {EXPORT}")
    gpu = _of_one_device(path, gpu, device)
    about, number = _table(data), _device(gpu[0])
    listed = about.get("deviceProperties")
    names = [d["name"] for d in map(_table, listed if isinstance(listed, list) else ())
             if d.get("id") == number and "name" in d]
    rank = _whole(_table(about.get("distributedInfo")).get("rank"))
    return TraceFile(path, str([*names, f"GPU {number}"][0]), rank, _steps(spans, gpu))


def _parsed(path: Path) -> Any:
    try:
        with gzip.open(regular(path)) if path.suffix == ".gz" else regular(path).open("rb") as stream:
            raw = stream.read(MOST_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkbenchError(f"{path}: not a whole gzip file ({error}): copy or {EXPORT}") from None
    if len(raw) > MOST_BYTES:
        raise WorkbenchError(f"{path}: larger than {MOST_BYTES / 2**30:.0f} GiB: profile fewer steps, such as with "
                             "torch.profiler.schedule(wait=1, warmup=1, active=2), and without with_stack")
    try:
        return json.loads(raw)
    except UnicodeDecodeError:
        raise WorkbenchError(f"{path}: a binary file, and a trace is JSON: {EXPORT}") from None
    except json.JSONDecodeError as error:
        ended = error.pos >= len(raw.decode(errors="replace").rstrip()) - 1
        what = "the file is truncated" if ended or raw.lstrip()[:1] in (b"{", b"[") else "this is no JSON"
        raise WorkbenchError(f"{path}: line {error.lineno}: {error.msg}: {what}: {EXPORT}, after the profiler has "
                             "stopped") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or lists inside lists
        raise WorkbenchError(f"{path}: no JSON that a profiler writes: {EXPORT}") from None


def _is_timed(event: Mapping[str, Any]) -> bool:
    ts, dur = event.get("ts"), event.get("dur")
    timed = isinstance(ts, int | float) and isinstance(dur, int | float) and abs(ts) < LATEST and 0 <= dur < LATEST
    return timed and isinstance(event.get("name"), str)


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    return _table(event.get("args"))


def _table(found: Any) -> dict[str, Any]:
    return found if isinstance(found, dict) else {}


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) else None


def _of_one_device(path: Path, gpu: list[dict[str, Any]], device: int | None) -> list[dict[str, Any]]:
    devices = sorted({_device(e) for e in gpu})
    if device is None and len(devices) > 1:
        raise WorkbenchError(f"{path}: holds GPUs {', '.join(map(str, devices))}: choose one with --device")
    if device is not None and device not in devices:
        raise WorkbenchError(f"{path}: holds no GPU {device}: it holds {', '.join(map(str, devices))}")
    wanted = devices[0] if device is None else device
    return [e for e in gpu if _device(e) == wanted]


def _device(event: Mapping[str, Any]) -> int:
    return _whole(_args(event).get("device")) or 0


def _steps(spans: Sequence[Mapping[str, Any]], gpu: Sequence[Mapping[str, Any]]) -> tuple[TracedStep, ...]:
    calls: dict[int | None, Any] = {
        number: e for e in spans if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and (number := _whole(_args(e).get("correlation"))) is not None}
    marks = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in spans
                   if e.get("cat") == "user_annotation" and _STEP.match(e["name"]))
    begins = [begin for begin, *_ in marks]

    def step_at(time: float) -> str:
        i = bisect_right(begins, time) - 1
        return marks[i][2] if i >= 0 and time <= marks[i][1] else ""

    found: dict[str, list[GpuEvent]] = defaultdict(list)
    for e in gpu:
        number = _whole(_args(e).get("correlation"))
        call = calls.get(number) if number is not None else None
        event = _event(e, call)
        found[step_at(call["ts"] if call else event.begin) if marks else "whole trace"].append(event)
    starts = [e for e in calls.values() if "LaunchKernel" in e["name"] or "GraphLaunch" in e["name"]]
    launches: dict[str, int] = defaultdict(int)
    for e in starts:
        launches[step_at(e["ts"]) if marks else "whole trace"] += 1
    names = dict.fromkeys(name for *_, name in marks) if marks else ["whole trace"]
    return tuple(TracedStep(name, tuple(sorted(found[name], key=lambda e: e.begin)), launches[name])
                 for name in names if found[name])


def _event(e: Mapping[str, Any], call: Mapping[str, Any] | None) -> GpuEvent:
    args = _args(e)
    about = args.get("Collective name") or ""
    if about:
        parts = [str(about), *(f"{args[key]} {unit}" for key, unit in
                               (("In msg nelems", "elements"), ("dtype", ""), ("Group size", "ranks")) if key in args)]
        about = ", ".join(part.strip() for part in parts)
    stream = _whole(args.get("stream", e.get("tid"))) or 0
    launched = None if call is None else float(call["ts"] + call["dur"])
    return GpuEvent(e["name"], kind_of(e["name"]), stream, float(e["ts"]), float(e["ts"] + e["dur"]),
                    launched, call is not None and "GraphLaunch" in call["name"], about, _group(args))


def _group(args: Mapping[str, Any]) -> str:
    """The description of the process group, which names a mesh's axis, or its name; "" where the trace has neither."""
    said = [str(args.get(f"Process Group {key}", "")).strip('"') for key in ("Description", "Name")]
    return next((text.removeprefix("mesh_")[:NAME] for text in said if text not in ("", "undefined")), "")
