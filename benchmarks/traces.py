"""A trace of two steps, with nothing in it but what `workbench order` reads."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
FIELDS = ("ph", "cat", "name", "ts", "dur")
ABOUT = ("device", "stream", "correlation", "Collective name", "In msg nelems", "dtype", "Group size",
         "Process Group Description", "Process Group Name")


def save_trace(step: Callable[[], Any], path: Path) -> None:
    """Run `step` three times, the last two traced, and write `path` (.json.gz). Every rank calls it; needs CUDA."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
                     schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
                     on_trace_ready=lambda seen: seen.export_chrome_trace(file.name)) as seen:
            for _ in range(3):
                step()
                torch.cuda.synchronize()
                seen.step()
        whole = json.loads(Path(file.name).read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps(small(whole), separators=(",", ":")).encode(), mtime=0))


def small(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The same trace without the CPU's operators, Python's frames and whatever else no GPU event belongs to."""
    events = [e for e in whole["traceEvents"] if e.get("ph") == "X"]
    kept = [e for e in events if e.get("cat") in GPU]
    numbers = {e["args"].get("correlation") for e in kept}
    kept += [e for e in events if e.get("cat") in CALLS and e["args"].get("correlation") in numbers]
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    devices = [{key: d[key] for key in ("id", "name")} for d in whole.get("deviceProperties", ())]
    return {
        "deviceProperties": devices, "distributedInfo": whole.get("distributedInfo", {}),
        "traceEvents": [{**{key: e[key] for key in FIELDS},
                         "args": {key: e["args"][key] for key in ABOUT if key in e.get("args", {})}}
                        for e in [*kept, *marks]],
    }
