"""What a traced job communicates in each step, what hides it, and what keeps the rest from being hidden."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.pipeline.gpu_communication import (
    COMPUTE,
    NEGLIGIBLE,
    Interval,
    gaps,
    length,
    overlap,
    union,
    waited_for,
    waits_counted,
    waits_inside,
)
from workbench.recipe.wording import aligned, json_text
from workbench.tools.timing.trace_file import GpuEvent, TracedStep, TraceFile, read_trace

if TYPE_CHECKING:
    from workbench.graph.read.simulated_run import StepTimeline

NEAR_US = 20.0
"""Two events follow each other at once where less lies between them: a launch from the CPU takes about 10 µs."""
SHOWN, NAME = 10, 60


@dataclass(frozen=True)
class TracedCollective:
    """One communication on the GPU, in milliseconds.

    exposed_ms: no compute runs meanwhile. shared_ms: of these, other communication runs. behind: the compute kernels
    that run meanwhile, by name, the longest first. waits_ms: how much longer it takes than on the rank where it is
    shortest, which came last; None for one rank. why: what keeps it from being hidden; "" where it is hidden.
    """

    number: int
    name: str
    kind: str
    about: str
    stream: int
    begin_ms: float
    ms: float
    exposed_ms: float
    shared_ms: float
    behind: dict[str, float]
    why: str
    waits_ms: float | None = None

    @property
    def hidden(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class StepOrder:
    """One step of one rank, in milliseconds. idle_ms: between its first and last event, nothing runs on the GPU.

    waiting_ms: of the compute, kernels that wait for other ranks inside, with their waits.
    """

    step: str
    rank: int | None
    span_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float
    launches: int
    collectives: tuple[TracedCollective, ...] = field(repr=False)
    waiting_ms: float = 0.0


@dataclass(frozen=True)
class TraceOrder:
    """What `read_order` found: a row a step and rank, and the collectives that cost most."""

    device: str
    steps: tuple[StepOrder, ...]
    traced: tuple[TracedStep, ...] = field(repr=False, compare=False)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return json_text({"device": self.device, "steps": [asdict(step) for step in self.steps]})

    def timeline(self, number: int = 0) -> StepTimeline:
        """A step as `show(..., "timeline")` draws it: a lane for compute, and one for each process group.

        Where the trace does not name the group, its stream has a lane; in a replayed CUDA graph, where streams are
        branches of the graph, each kind of communication has one.
        """
        from workbench.graph.read.simulated_run import BEHIND_OTHERS, HIDDEN, Span, StepTimeline

        step, events = self.steps[number], self.traced[number].events
        start = events[0].begin
        spans = [Span(e.name, "compute", (e.begin - start) / 1e3, (e.end - start) / 1e3)
                 for e in events if e.kind == COMPUTE]
        compute = [e for e in events if e.kind == COMPUTE]
        talk = [e for e in events if e.kind != COMPUTE]
        waited = waited_for(_covered(compute), [(e.begin, e.end) for e in talk])
        for c, e, us in zip(step.collectives, talk, waited, strict=True):
            limit = HIDDEN if c.hidden else BEHIND_OTHERS if us < NEGLIGIBLE * 1e3 * c.ms else c.why
            spans.append(Span(f"{c.number} {c.name}", _lane(e), c.begin_ms, c.begin_ms + c.ms, c.exposed_ms, limit,
                              c.about, shared=c.exposed_ms - us / 1e3))
        return StepTimeline(f"measured on {self.device}", tuple(spans), step.span_ms, step.compute_ms)

    def __str__(self) -> str:
        several = len({step.rank for step in self.steps}) > 1
        heads = ("step", *(("rank",) if several else ()), "ms", "compute", "communication", "exposed", "idle",
                 "launches", "hidden")
        rows = [(s.step, *((str(s.rank),) if several else ()), f"{s.span_ms:,.2f}", f"{s.compute_ms:,.2f}",
                 f"{s.communication_ms:,.2f}", f"{s.exposed_ms:,.2f}", f"{s.idle_ms:,.2f}", f"{s.launches:,}",
                 f"{sum(c.hidden for c in s.collectives)} of {len(s.collectives)}") for s in self.steps]
        lines = [f"traced on {self.device}; milliseconds", *aligned([heads, *rows], range(1, len(heads)))]
        last = self.steps[-1]
        if waiting := max(step.waiting_ms for step in self.steps):
            lines.append(f"up to {waits_counted(waiting)}: a trace cannot separate the wait from the product")
        costly = sorted((c for c in last.collectives if c.why), key=lambda c: -c.exposed_ms)[:SHOWN]
        if costly:
            where = last.step + (f" on rank {last.rank}" if several else "")
            lines += ["", f"{where}: the {len(costly)} collectives that are exposed longest"]
        for c in costly:
            about = f" ({c.about})" if c.about else ""
            lines.append(f"  {c.number:>4} {_short(c.name)}{about}: {c.exposed_ms:,.3f} of {c.ms:,.3f} ms exposed: "
                         f"{c.why}")
            if c.shared_ms > NEGLIGIBLE * c.ms:
                lines.append(f"       {c.shared_ms:,.3f} ms of it beside other communication")
            if c.waits_ms is not None and c.waits_ms > NEGLIGIBLE * c.ms:
                lines.append(f"       {c.waits_ms:,.3f} ms of it waiting for the rank that came last")
            if c.behind:
                lines.append("       hidden behind " + ", ".join(f"{_short(name)} {ms:,.3f}"
                                                                 for name, ms in list(c.behind.items())[:3]))
        return "\n".join(lines)


def _lane(e: GpuEvent) -> str:
    if e.group or not e.graph:
        return e.group or f"stream {e.stream}"
    found = re.match(r"nccl\w*?Kernel_([A-Za-z]+)", e.name)
    return f"replayed {found[1] if found else e.kind}"


def _short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= NAME else name[:NAME - 1] + "…"


def read_order(paths: Sequence[Path | str], step: str | None = None, device: int | None = None) -> TraceOrder:
    """Read one trace, or one of each rank of the same job.

    step: the number of one step, where the trace has several; by default all. device: see `read_trace`. Raises
    WorkbenchError for a file that is no trace, a step that is not there, and ranks whose steps do not fit together.
    """
    traces = [read_trace(path, device) for path in paths]
    found: list[tuple[StepOrder, TracedStep]] = []
    for trace in traces:
        wanted = [s for s in trace.steps if step is None or s.name in (step, f"ProfilerStep#{step}")]
        if not wanted:
            known = ", ".join(s.name.removeprefix("ProfilerStep#") for s in trace.steps)
            raise WorkbenchError(f"{trace.path}: no step" + (f" {step}: it has {known}" if known and step else
                                 ", or none in which GPU events were launched"))
        found += [(_step_order(s, trace.rank), s) for s in wanted]
    if len(traces) > 1:
        found = list(zip(_with_waits(traces, [order for order, _ in found]), [s for _, s in found], strict=True))
    return TraceOrder(traces[0].device, tuple(order for order, _ in found), tuple(s for _, s in found))


def _with_waits(traces: Sequence[TraceFile], orders: Sequence[StepOrder]) -> list[StepOrder]:
    """The same, with how long each collective waits for the rank that comes last."""
    ranks = [trace.rank for trace in traces]
    if len(set(ranks)) < len(ranks):
        raise WorkbenchError(f"{traces[1].path}: traces of ranks {', '.join(map(str, ranks))}: give one of each rank")
    made: list[StepOrder] = []
    for order in orders:
        others = [o for o in orders if o.step == order.step]
        listed = [[(c.kind, c.name) for c in o.collectives] for o in others]
        if len(others) < len(traces) or any(names != listed[0] for names in listed):
            made.append(order)  # ranks of other groups, or of a pipeline's other stages
            continue
        least = [min(o.collectives[i].ms for o in others) for i in range(len(order.collectives))]
        waits = tuple(replace(c, waits_ms=c.ms - ms) for c, ms in zip(order.collectives, least, strict=True))
        made.append(replace(order, collectives=waits))
    return made


def _covered(events: Sequence[GpuEvent]) -> list[Interval]:
    return union((e.begin, e.end) for e in events)


def _step_order(step: TracedStep, rank: int | None) -> StepOrder:
    compute = [e for e in step.events if e.kind == COMPUTE]
    talk = [e for e in step.events if e.kind != COMPUTE]
    busy, talking, everything = _covered(compute), _covered(talk), _covered(step.events)
    start, end = everything[0][0], everything[-1][1]
    others = {stream: _covered([e for e in talk if e.stream != stream]) for stream in {e.stream for e in talk}}
    by_end = sorted(compute, key=lambda c: c.end)
    longest = max((c.end - c.begin for c in compute), default=0.0)
    last_on: dict[int, GpuEvent] = {}
    found = []
    for number, e in enumerate(talk):
        exposed = e.end - e.begin - overlap(busy, e.begin, e.end)
        why = _why(e, compute, by_end, last_on.get(e.stream)) if exposed > NEGLIGIBLE * (e.end - e.begin) else ""
        last_on[e.stream] = e
        behind: Counter[str] = Counter()
        first = bisect_left(compute, e.begin - longest, key=lambda c: c.begin)
        for c in compute[first: bisect_left(compute, e.end, key=lambda c: c.begin)]:
            if c.end > e.begin:
                behind[c.name] += (min(c.end, e.end) - max(c.begin, e.begin)) / 1e3  # type: ignore[assignment]
        shared = sum(overlap(others[e.stream], a, b) for a, b in gaps(busy, e.begin, e.end))
        found.append(TracedCollective(number, e.name, e.kind, e.about, e.stream, (e.begin - start) / 1e3,
                                      (e.end - e.begin) / 1e3, exposed / 1e3, shared / 1e3,
                                      dict(behind.most_common()), why))
    return StepOrder(step.name, rank, (end - start) / 1e3, length(busy) / 1e3, length(talking) / 1e3,
                     (length(everything) - length(busy)) / 1e3, (end - start - length(everything)) / 1e3,
                     step.launches, tuple(found),
                     length(_covered([e for e in compute if waits_inside(e.name)])) / 1e3)


def _why(e: GpuEvent, compute: Sequence[GpuEvent], by_end: Sequence[GpuEvent], before: GpuEvent | None) -> str:
    """What keeps a collective from being hidden.

    compute, by_end: the compute kernels, sorted by their begin and by their end. before: the one before it on its
    stream.
    """
    reasons = []
    i = bisect_right(by_end, e.begin + NEAR_US, key=lambda c: c.end)
    ended = by_end[i - 1] if i else None
    if before is not None and e.begin - before.end < NEAR_US and (e.launched is None or e.launched < before.end):
        reasons.append(f"its stream was busy with {_short(before.name)}")
    elif e.launched is not None and not e.graph and e.begin - e.launched < NEAR_US:
        reasons.append("the CPU launched it late, when the GPU had nothing else to do"
                       if ended is None or e.launched > ended.end else "the CPU launched it just before")
    elif ended is not None and e.begin - ended.end < NEAR_US:
        reasons.append(f"it starts when {_short(ended.name)} ends, whose result it may send")
    after = bisect_left(compute, e.end - NEAR_US, key=lambda c: c.begin)
    reader = compute[after] if after < len(compute) else None
    if reader is not None and reader.begin - e.end < NEAR_US and (reader.launched is None or reader.launched < e.end):
        reasons.append(f"{_short(reader.name)} waits for it")
    return "; ".join(reasons) or "no compute was ready to run meanwhile"
