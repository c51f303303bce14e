"""What "Read your own trace" reads: recorded traces, small ones made by hand, and what its checkpoints ask for."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, temporary
from workbench.notebook.lessons.grading import by_cases, close
from workbench.pipeline.gpu_communication import COMPUTE
from workbench.tools.timing.order import read_order
from workbench.tools.timing.trace_file import TracedStep

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "traces_h200"
KINDS = {
    "products": ("nvjet", "gemm", "cutlass", "cublas"), "attention": ("sdpa", "flash", "cudnn"),
    "optimizer": ("multi_tensor_apply",), "copies": ("Memcpy", "Memset", "chunk_cat", "split_with_sizes", "CatArray"),
}
"""Parts of a kernel's name that tell its kind; what has none of them is pointwise, a norm or the loss."""
REST = "rest"
Span = tuple[str, int, float, float, float]
"""A kernel: its name, its stream, and in microseconds when the CPU launched it, when it began and when it ended."""


def recorded(name: str) -> Path:
    """The recorded trace of this name. WorkbenchError lists those that there are."""
    path = RECORDED / f"{name}.rank0.json.gz"
    if not path.is_file():
        there = ", ".join(sorted(p.name.split(".")[0] for p in RECORDED.glob("*.json.gz"))) or "none"
        raise WorkbenchError(f"{path}: no such recorded trace: there are {there}; run from a checkout")
    return path


def save_spans(spans: Sequence[Span], path: Path | str) -> Path:
    """Write kernels as torch.profiler writes them: for each an event of the GPU, and one of the CPU's call."""
    events: list[dict[str, Any]] = []
    for number, (name, stream, launched, begin, end) in enumerate(spans):
        called, ran = {"correlation": number}, {"correlation": number, "device": 0, "stream": stream}
        events += [{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched - 5, "dur": 5,
                    "args": called},
                   {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": ran}]
    path = Path(path)
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": "paper"}], "traceEvents": events}),
                    encoding="utf-8")
    return path


def profiled(step: Callable[[], Any], path: Path) -> Path:
    """Write a trace of `step`, run twice under torch.profiler. What Kineto prints of itself is dropped."""
    import torch

    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    with open(os.devnull, "wb") as nothing:
        try:
            for fd, _ in kept:
                os.dup2(nothing.fileno(), fd)
            with torch.profiler.profile() as seen:
                for _ in range(2):
                    step()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        finally:
            for fd, copy in kept:
                os.dup2(copy, fd)
                os.close(copy)
    seen.export_chrome_trace(str(path))
    return path


def kinds_of(step: TracedStep) -> dict[str, float]:
    """Milliseconds of a step's kernels by kind, those of `KINDS` first; communication is none of them."""
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in (e for e in step.events if e.kind == COMPUTE):
        kind = next((kind for kind, parts in KINDS.items() if any(p in event.name for p in parts)), REST)
        found[kind] += (event.end - event.begin) / 1e3
    return found


def gaps_of(step: TracedStep) -> Iterator[tuple[float, float, float | None]]:
    """When nothing runs on the GPU: where it begins and ends, and when the next kernel was launched, if known."""
    end = step.events[0].end
    for event in step.events[1:]:
        if event.begin > end:
            yield end, event.begin, event.launched
        end = max(end, event.end)


def floor_ms(step: TracedStep) -> float:
    """Milliseconds of what no fusion removes."""
    return sum(ms for kind, ms in kinds_of(step).items() if kind in ("products", "attention", "optimizer"))


def late_ms(step: TracedStep) -> float:
    """Milliseconds in which the GPU is idle because the next kernel was not launched yet when the last one ended."""
    return sum(end - begin for begin, end, launched in gaps_of(step)
               if launched is not None and launched > begin) / 1e3


def near(answer: Any, *, truth: float, within: float = 0.01) -> tuple[float, str]:
    """Grades a number: right or wrong, and on which side."""
    score, message = close(answer, truth=truth, within=within)
    return float(score >= 1), message


def _cases() -> Iterator[tuple[str, list[Span]]]:
    yield "one product", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 50, 150)]
    yield "a hidden collective", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 20, 90)]
    yield "idle time", [("a", 7, 0, 0, 100), ("ncclA", 20, 0, 150, 250), ("b", 7, 0, 300, 310)]
    yield "two products at once", [("a", 7, 0, 0, 60), ("b", 8, 0, 40, 100), ("ncclA", 20, 0, 0, 120)]
    yield "two collectives at once", [("a", 7, 0, 0, 20), ("ncclA", 20, 0, 20, 120), ("ncclB", 21, 0, 70, 170)]
    seed = random.Random(7)
    for _ in range(20):
        spans = []
        for number in range(10):
            begin = float(seed.randrange(500))
            name, streams = ("ncclA", (20, 21)) if number % 2 else ("a", (7, 8))
            spans.append((name, seed.choice(streams), 0.0, begin, begin + seed.randrange(10, 120)))
        yield "ten kernels at random", spans


def exposes(answer: Any) -> tuple[float, str]:
    """Grades a function from spans to exposed microseconds by what `workbench order` says of the same spans.

    The message names the first kind of case that is wrong. What is wrong with one product scores 0.
    """
    if not callable(answer):
        return 0.0, "give a function of a list of spans"
    return by_cases(answer, _cases(), _problem, "one product")


def _problem(answer: Callable[[list[Span]], Any], spans: list[Span]) -> str:
    with temporary(lambda: tempfile.TemporaryDirectory(prefix="workbench-spans-")) as folder:
        wanted = 1e3 * read_order([save_spans(spans, Path(folder) / "spans.json")]).steps[0].exposed_ms
    try:
        got = float(answer(list(spans)))
    except Exception as error:  # the reader's code
        return f"{type(error).__name__}: {error}"
    return "" if abs(got - wanted) < 1e-6 * max(1.0, wanted) else f"got {got:g} µs, wanted {wanted:g} µs"
