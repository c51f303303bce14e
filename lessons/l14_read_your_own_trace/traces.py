"""What "Read your own trace" reads: recorded traces, and small ones made by hand."""

from __future__ import annotations

import glob
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.lab.traces.order import StepOrder, TraceOrder, read_order
from workbench.lab.traces.trace_file import TracedStep
from workbench.pipeline.gpu_communication import COMPUTE, gaps, union
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.recorded_figures import json_lines

RESULTS = results_dir()
FOLDERS = {1: ("traces_h200", "traces_h200/steps.jsonl"), 2: ("traces_h200x2", "llama3_1b_h200x2.jsonl")}
"""By the number of GPUs: the folder of recorded traces, and the timed steps of the same jobs."""
KINDS = {
    "matmuls": ("nvjet", "gemm", "cutlass", "cublas"), "attention": ("sdpa", "flash", "cudnn"),
    "optimizer": ("multi_tensor_apply",), "copies": ("Memcpy", "Memset", "chunk_cat", "split_with_sizes", "CatArray"),
}
"""Parts of a kernel's name that tell its kind; what has none of them is pointwise, a norm or the loss."""
REST, FLOOR = "rest", ("matmuls", "attention", "optimizer")
THIRD, FUSED = "eager", "compile"
"""The job of the checkpoint "remedy", and the job that differs from it by torch.compile for each block."""
Span = tuple[str, int, float, float, float]
"""A kernel: its name, its stream, and in microseconds when the CPU launched it, when it began and when it ended."""


def recorded(name: str, rank: int = 0, gpus: int = 1) -> Path:
    """The recorded trace of this name and rank. WorkbenchError lists those that there are."""
    folder = RESULTS / FOLDERS[gpus][0]
    path = folder / f"{name}.rank{rank}.json.gz"
    if not path.is_file():
        there = ", ".join(sorted({p.name.split(".")[0] for p in folder.glob("*.json.gz")})) or "none"
        raise WorkbenchError(f"{path}: no such recorded trace: there are {there}")
    return path


def timed(name: str, gpus: int = 1) -> list[float]:
    """Milliseconds of each step that the benchmark timed without a profiler, in all its runs of this job."""
    return [ms for line in json_lines(RESULTS / FOLDERS[gpus][1])
            if line["variant"] == name and line["changes"]["mesh.tp"] == "1" for ms in line["steps_ms"]]


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


def met(begins: Mapping[str, float], transfer: float) -> dict[str, list[Span]]:
    """One all-gather on each rank, by rank: each kernel begins when it can, and all end with the transfer."""
    end = max(begins.values()) + transfer
    return {rank: [("nccl gather", 20, begin, begin, end)] for rank, begin in begins.items()}


def lanes(spans: Sequence[Span], us: int) -> str:
    """A line of letters for each stream: in each `us` microseconds the last letter of the kernel that runs, or a dash.
    """
    begin, end = min(s[3] for s in spans), max(s[4] for s in spans)
    lines = []
    for stream in sorted({s[1] for s in spans}):
        own = [s for s in spans if s[1] == stream]
        lane = "".join(next((name[-1] for name, *_, first, last in own if first <= at < last), "-")
                       for at in range(int(begin), int(end), us))
        lines.append(f"stream {stream:2}  {lane}")
    return "\n".join(lines)


def kind_of(name: str) -> str:
    """The kind of a kernel that computes, by its name."""
    return next((kind for kind, parts in KINDS.items() if any(p in name for p in parts)), REST)


def kinds_of(step: TracedStep) -> dict[str, float]:
    """Milliseconds of a step's kernels by kind, those of `KINDS` first; communication is none of them."""
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for event in (e for e in step.events if e.kind == COMPUTE):
        found[kind_of(event.name)] += (event.end - event.begin) / 1e3
    return found


def top_of(step: TracedStep, kind: str, most: int = 3) -> list[tuple[str, float]]:
    """The names of a kind that take the most milliseconds in all."""
    found: Counter[str] = Counter()
    for event in (e for e in step.events if e.kind == COMPUTE and kind_of(e.name) == kind):
        found[short(event.name)] += (event.end - event.begin) / 1e3  # type: ignore[assignment]
    return [(name, float(ms)) for name, ms in found.most_common(most)]


def gaps_of(step: TracedStep) -> Iterator[tuple[float, float, float | None]]:
    """When nothing runs on the GPU: where it begins and ends, and when the next kernel was launched, if known."""
    end = step.events[0].end
    for event in step.events[1:]:
        if event.begin > end:
            yield end, event.begin, event.launched
        end = max(end, event.end)


def spans_of(step: TracedStep) -> list[Span]:
    """A traced step's kernels; its first one begins at 0."""
    first = step.events[0].begin
    return [(e.name, e.stream, (e.begin if e.launched is None else e.launched) - first, e.begin - first, e.end - first)
            for e in step.events]


def aligned(ranks: Sequence[TracedStep]) -> list[list[Span]]:
    """The kernels of one step on each rank, moved so that the first collective ends at the same time on all ranks.

    The kernel that then begins first begins at 0.
    """
    listed = [spans_of(step) for step in ranks]
    ends = [next(e.end - step.events[0].begin for e in step.events if e.kind != COMPUTE) for step in ranks]
    return [[(name, stream, launched + late, begin + late, end + late) for name, stream, launched, begin, end in spans]
            for spans, late in zip(listed, (max(ends) - own for own in ends), strict=True)]


def window(begin_ms: float, end_ms: float, steps: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """What of each step's kernels runs between two times, which are its 0 and its end."""
    first, last = 1e3 * begin_ms, 1e3 * end_ms
    clipped: dict[str, list[Span]] = {}
    for title, spans in steps.items():
        inside = [span for span in spans if span[3] < last and span[4] > first]
        clipped[title] = [(name, stream, launched - first, max(begin, first) - first, min(end, last) - first)
                          for name, stream, launched, begin, end in inside]
    return clipped


def longest_late(step: TracedStep, most: int) -> tuple[list[tuple[str, str, str, str]], str]:
    """The longest gaps that the CPU causes, each with the next kernel; and how many gaps of each cause there are."""
    first, after = step.events[0].begin, {e.begin: e.name for e in reversed(step.events)}
    late = late_gaps(step)
    queued = [end - begin for begin, end, launched in gaps_of(step) if launched is not None and launched <= begin]
    rows = [(f"{(begin - first) / 1e3:.1f}", f"{end - begin:.0f}", f"{launched - begin:+,.0f}", short(after[end]))
            for begin, end, launched in sorted(late, key=lambda gap: gap[0] - gap[1])[:most]]
    also = (f"; {len(queued)} in which the next kernel was in the queue: about {sum(queued) / len(queued):.0f} µs "
            f"each, {max(queued):.0f} µs at most") if queued else ""
    return rows, f"{len(late)} gaps in which the CPU was late: the longest {len(rows)} are listed{also}"


def short(name: str) -> str:
    """A kernel's name without namespaces and arguments; of a pointwise kernel also the functor that it applies."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", plain)[0].split("::")[-1].strip()
    functor = re.search(r"\w*Functor|\w+_kernel_cuda", name)
    return f"{head} {functor[0]}" if functor else head or name


def exposed_by(step: StepOrder, traced: TracedStep) -> list[tuple[str, int, float, float, float, float, float]]:
    """By kind of collective: how many, milliseconds, those exposed, and of these what has one of two causes.

    The causes: a wait for another rank, as two bounds; and no compute kernel in the queue, because the CPU launches the
    next one only later. The wait at least: what is exposed less the time on the rank where the collective is shortest,
    as if the transfer were exposed first. At most: the whole wait, up to what is exposed.
    """
    compute = [e for e in traced.events if e.kind == COMPUTE]
    busy = union((e.begin, e.end) for e in compute)
    found: dict[str, list[float]] = {}
    for each, event in zip(step.collectives, (e for e in traced.events if e.kind != COMPUTE), strict=True):
        row = found.setdefault(each.name.removeprefix("ncclDevKernel_").split("_")[0], [0, 0.0, 0.0, 0.0, 0.0, 0.0])
        empty = 0.0
        for begin, end in gaps(busy, event.begin, event.end):
            after = bisect_left(compute, end, key=lambda c: c.begin)
            later = compute[after] if after < len(compute) else event
            together = later.graph and event.graph  # launched at once
            late = not together and (later.launched or 0.0) > begin
            empty += (end - begin) / 1e3 if late else 0.0
        waits = each.waits_ms or 0.0
        least, most = max(0.0, each.exposed_ms - (each.ms - waits)), min(waits, each.exposed_ms)
        for i, more in enumerate((1, each.ms, each.exposed_ms, least, most, empty)):
            row[i] += more
    return [(kind, int(n), ms, exposed, least, most, empty)
            for kind, (n, ms, exposed, least, most, empty) in found.items()]


def causes(step: StepOrder, traced: TracedStep) -> tuple[int, float, float, float, float]:
    """How many gathers a step has, and its sums of `exposed_by`: exposed, waits at least and at most, the CPU late."""
    rows = exposed_by(step, traced)
    gathers = sum(number for kind, number, *_ in rows if kind == "AllGather")
    _, exposed, least, most, empty = (sum(parts) for parts in list(zip(*rows, strict=True))[2:]) if rows else [0.0] * 5
    return gathers, exposed, least, most, empty


def last_of(order: TraceOrder) -> list[tuple[StepOrder, TracedStep]]:
    """Each rank's last step: what was found in it, and its kernels."""
    both = zip(order.steps, order.traced, strict=True)
    return [(step, traced) for step, traced in both if step.step == order.steps[-1].step]


def third_job() -> TraceOrder:
    """Both ranks' traces of the job that the checkpoint asks for."""
    return read_order([recorded(THIRD, rank, gpus=2) for rank in (0, 1)])


def floor_ms(step: TracedStep) -> float:
    """Milliseconds of what no fusion removes."""
    return sum(ms for kind, ms in kinds_of(step).items() if kind in FLOOR)


def late_gaps(step: TracedStep) -> list[tuple[float, float, float]]:
    """The gaps in which the next kernel was not launched yet when the last one ended."""
    return [(begin, end, by) for begin, end, by in gaps_of(step) if by is not None and by > begin]


def late_ms(step: TracedStep) -> float:
    """Milliseconds in which the GPU is idle because the CPU was late."""
    return sum(end - begin for begin, end, _ in late_gaps(step)) / 1e3


def late_parts(step: TracedStep, early_us: float = 2000) -> tuple[float, float]:
    """`late_ms` in two parts: in gaps that begin in the step's first microseconds, and in later ones."""
    early = step.events[0].begin + early_us
    first = sum(end - begin for begin, end, _ in late_gaps(step) if begin < early) / 1e3
    return first, late_ms(step) - first


def files_of(pattern: str) -> list[str]:
    """The files that a pattern such as `run/*.json.gz` names, in order; the pattern itself if it names none."""
    return sorted(glob.glob(pattern)) or [pattern]


def report(paths: Sequence[Path | str]) -> str:
    """All traced steps; of each rank's last one the kinds, the floor, the CPU's gaps, and what is exposed by cause."""
    order = read_order(paths)
    lines = [str(order).split("\n\n")[0]]  # the table; `workbench order` shows the collectives, too
    for step, traced in last_of(order):
        early_ms = min(2.0, step.span_ms / 10)
        first, later = late_parts(traced, 1e3 * early_ms)
        lines += ["", step.step + ("" if step.rank is None else f" of rank {step.rank}"),
                  ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in kinds_of(traced).items()),
                  "longest in rest:", *(f"  {ms:.1f} ms {name}" for name, ms in top_of(traced, REST)),
                  f"compute less the floor {step.compute_ms - floor_ms(traced):.1f} ms",
                  f"the CPU was late for {first:.2f} ms in gaps of the first {early_ms:.2g} ms, "
                  f"for {later:.2f} ms later"]
        known = all(c.waits_ms is not None for c in step.collectives)
        for kind, number, _, exposed, least, most, empty in exposed_by(step, traced):
            waits = f"waits for another rank {least:.2f} to {most:.2f} ms" if known else "waits: read all ranks' traces"
            lines.append(f"{number} {kind}: exposed {exposed:.2f} ms; {waits}; the CPU was late {empty:.2f} ms")
    return "\n".join(lines)
