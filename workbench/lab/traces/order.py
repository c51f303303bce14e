"""What a traced job communicates in each step, what hides it, and what keeps the rest from being hidden."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.lab.traces.trace_file import GpuEvent, TracedStep, TraceFile, read_trace
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
from workbench.pipeline.progress import telling
from workbench.recipe.files import print_result, writable
from workbench.recipe.wording import aligned, counted, json_text

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
    """What `read_order` found: a row a step and rank, and the collectives that cost most.

    left_out: one sentence for each trace with events that belong to no step.
    """

    device: str
    steps: tuple[StepOrder, ...]
    traced: tuple[TracedStep, ...] = field(repr=False, compare=False)
    left_out: tuple[str, ...] = ()

    def to_json(self) -> str:
        """All of it as JSON text."""
        steps = [asdict(step) for step in self.steps]
        return json_text({"device": self.device, "steps": steps, "left_out": self.left_out})

    def timeline(self, number: int = 0) -> StepTimeline:
        """A step as `show(..., "timeline")` draws it: a lane for compute, and one for each process group.

        Where the trace does not name the group, its stream has a lane; in a replayed CUDA graph, where streams are
        branches of the graph, each kind of communication has one.
        """
        from workbench.graph.read.simulated_run import BEHIND_OTHERS, HIDDEN, Span, StepTimeline

        step, events = self.steps[number], self.traced[number].events
        compute, talk = _parted(events)
        start = events[0].begin
        spans = [
            Span(e.name, "compute", (e.begin - start) / 1e3, (e.end - start) / 1e3) for e in compute
        ]
        waited = waited_for(_covered(compute), [(e.begin, e.end) for e in talk])
        for c, e, us in zip(step.collectives, talk, waited, strict=True):
            limit = c.why or HIDDEN
            if c.why and us < NEGLIGIBLE * 1e3 * c.ms:
                limit = BEHIND_OTHERS
            spans.append(Span(f"{c.number} {c.name}", _lane(e), c.begin_ms, c.begin_ms + c.ms, c.exposed_ms, limit,
                              c.about, shared=c.exposed_ms - us / 1e3))
        return StepTimeline(
            f"measured on {self.device}", tuple(spans), step.span_ms, step.compute_ms
        )

    def __str__(self) -> str:
        several = len({step.rank for step in self.steps}) > 1
        heads = ["step", "rank", "ms", "compute", "communication", "exposed", "idle", "launches", "hidden"]
        rows = [heads, *map(_row, self.steps)]
        if not several:
            rows = [[step, *figures] for step, _, *figures in rows]
        table = aligned(rows, range(1, len(heads)))
        lines = [f"traced on {self.device}; milliseconds", *table, *self.left_out]
        if waiting := max(step.waiting_ms for step in self.steps):
            lines.append(
                f"up to {waits_counted(waiting)}: a trace cannot separate the wait from the product"
            )
        last = self.steps[-1]
        exposed = sorted((c for c in last.collectives if c.why), key=lambda c: -c.exposed_ms)[
            :SHOWN
        ]
        if exposed:
            where = last.step + (f" on rank {last.rank}" if several else "")
            of_them = f"{len(exposed)} collectives that are" if len(exposed) > 1 else "collective that is"
            lines += ["", f"{where}: the {of_them} exposed longest"]
        for collective in exposed:
            lines += _account(collective)
        return "\n".join(lines)


def _row(step: StepOrder) -> list[str]:
    times = (step.span_ms, step.compute_ms, step.communication_ms, step.exposed_ms, step.idle_ms)
    hidden = sum(c.hidden for c in step.collectives)
    return [step.step, str(step.rank), *(f"{ms:,.2f}" for ms in times), f"{step.launches:,}",
            f"{hidden} of {len(step.collectives)}"]


def _account(c: TracedCollective) -> list[str]:
    """What the text says of one exposed collective."""
    about = f" ({c.about})" if c.about else ""
    lines = [
        f"  {c.number:>4} {_short(c.name)}{about}: {c.exposed_ms:,.3f} of {c.ms:,.3f} ms exposed: {c.why}"
    ]
    if c.shared_ms > NEGLIGIBLE * c.ms:
        lines.append(f"       {c.shared_ms:,.3f} ms of it beside other communication")
    if c.waits_ms is not None and c.waits_ms > NEGLIGIBLE * c.ms:
        lines.append(f"       {c.waits_ms:,.3f} ms of it waiting for the rank that came last")
    if c.behind:
        longest = [f"{_short(name)} {ms:,.3f}" for name, ms in list(c.behind.items())[:3]]
        lines.append(f"       hidden behind {', '.join(longest)}")
    return lines


def _lane(e: GpuEvent) -> str:
    if e.group or not e.graph:
        return e.group or f"stream {e.stream}"
    kind = re.match(r"nccl\w*?Kernel_([A-Za-z]+)", e.name)
    return f"replayed {kind[1] if kind else e.kind}"


def _short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= NAME else name[:NAME - 1] + "…"


def command(args: argparse.Namespace) -> int:
    """`workbench order`."""
    writable(args.json)
    with telling() as tell:
        tell("read the traces")
        order = read_order(args.traces, args.step, args.device)
    print_result(lambda: order, args.json, order.to_json)
    return 0


def read_order(
    paths: Sequence[Path | str], step: str | None = None, device: int | None = None
) -> TraceOrder:
    """Read one trace, or one of each rank of the same job.

    step: the number of one step, where the trace has several; by default all. device: see `read_trace`. Raises
    WorkbenchError for a file that is no trace, a step that is not there, and traces of one rank or of two jobs.
    """
    files = [read_trace(path, device) for path in paths]
    ranks = [file.rank for file in files]
    if len(set(ranks)) < len(ranks):
        raise WorkbenchError(
            f"{files[1].path}: traces of ranks {', '.join(map(str, ranks))}: give one of each rank"
        )
    for file in files[1:]:
        _require_one_job(files[0], file)
    orders, traced = [], []
    for file in files:
        steps = [s for s in file.steps if step is None or s.name in (step, f"ProfilerStep#{step}")]
        if not steps:
            known = ", ".join(s.name.removeprefix("ProfilerStep#") for s in file.steps)
            raise WorkbenchError(
                f"{file.path}: no step {step or 'launched a GPU event'}: it has {known or 'none'}"
            )
        orders += [_step_order(s, file.rank) for s in steps]
        traced += steps
    if len(files) > 1:
        orders = [_with_waits(order, [o for o in orders if o.step == order.step], len(files)) for order in orders]
    left_out = [_left_out(file) for file in files if file.left_out]
    return TraceOrder(files[0].device, tuple(orders), tuple(traced), tuple(left_out))


def _require_one_job(one: TraceFile, other: TraceFile) -> None:
    """Jobs are told apart by their number of ranks, and by when they ran."""
    if one.world_size != other.world_size:
        sizes = counted(one.world_size, "rank"), counted(other.world_size, "rank")
        raise WorkbenchError(
            f"{other.path}: its job has {sizes[1]}, and that of {one.path} {sizes[0]}: give traces of one job"
        )
    if one.ran[1] < other.ran[0] or other.ran[1] < one.ran[0]:
        raise WorkbenchError(
            f"{other.path}: none of its steps ran while those of {one.path} did: give traces of one job and of the "
            "same steps"
        )


def _left_out(file: TraceFile) -> str:
    events, of_rank = file.left_out, "" if file.rank is None else f" of rank {file.rank}"
    ms = length(_covered(events)) / 1e3
    return (
        f"left out: {counted(len(events), 'GPU event')}{of_rank}, {ms:,.2f} ms in all, launched before the trace "
        f"began or timed before the launch: {_short(events[0].name)} first"
    )


def _with_waits(order: StepOrder, of_ranks: Sequence[StepOrder], ranks: int) -> StepOrder:
    """The same, with how long each collective waits for the rank that comes last.

    Unchanged where ranks do not run the same collectives: they are of other groups, or of a pipeline's other stages.
    """
    names = [[(c.kind, c.name) for c in o.collectives] for o in of_ranks]
    if len(of_ranks) < ranks or any(listed != names[0] for listed in names):
        return order
    shortest = [
        min(c.ms for c in same) for same in zip(*(o.collectives for o in of_ranks), strict=True)
    ]
    waits = [
        replace(c, waits_ms=c.ms - ms) for c, ms in zip(order.collectives, shortest, strict=True)
    ]
    return replace(order, collectives=tuple(waits))


def _parted(events: Sequence[GpuEvent]) -> tuple[list[GpuEvent], list[GpuEvent]]:
    """What computes, and what communicates."""
    return [e for e in events if e.kind == COMPUTE], [e for e in events if e.kind != COMPUTE]


def _covered(events: Sequence[GpuEvent]) -> list[Interval]:
    return union((e.begin, e.end) for e in events)


def _step_order(step: TracedStep, rank: int | None) -> StepOrder:
    compute, talk = _parted(step.events)
    busy, everything = _covered(compute), _covered(step.events)
    start, end = everything[0][0], everything[-1][1]
    others = {stream: _covered([e for e in talk if e.stream != stream]) for stream in {e.stream for e in talk}}
    by_end = sorted(compute, key=lambda c: c.end)
    longest = max((c.end - c.begin for c in compute), default=0.0)
    last_on: dict[int, GpuEvent] = {}
    collectives = []
    for number, e in enumerate(talk):
        us = e.end - e.begin
        exposed = us - overlap(busy, e.begin, e.end)
        why = _why(e, compute, by_end, last_on.get(e.stream)) if exposed > NEGLIGIBLE * us else ""
        last_on[e.stream] = e
        shared = sum(overlap(others[e.stream], a, b) for a, b in gaps(busy, e.begin, e.end))
        collectives.append(TracedCollective(
            number, e.name, e.kind, e.about, e.stream, (e.begin - start) / 1e3, us / 1e3, exposed / 1e3, shared / 1e3,
            _behind(e, compute, longest), why))
    waiting = _covered([e for e in compute if waits_inside(e.name)])
    return StepOrder(step.name, rank, (end - start) / 1e3, length(busy) / 1e3, length(_covered(talk)) / 1e3,
                     (length(everything) - length(busy)) / 1e3, (end - start - length(everything)) / 1e3,
                     step.launches, tuple(collectives), length(waiting) / 1e3)


def _behind(e: GpuEvent, compute: Sequence[GpuEvent], longest: float) -> dict[str, float]:
    """Milliseconds in which kernels run beside `e`, by name, the longest first. longest: microseconds of a kernel."""
    behind: Counter[str] = Counter()
    first = bisect_left(compute, e.begin - longest, key=lambda c: c.begin)
    last = bisect_left(compute, e.end, key=lambda c: c.begin)
    for c in compute[first:last]:
        if c.end > e.begin:
            behind[c.name] += (min(c.end, e.end) - max(c.begin, e.begin)) / 1e3  # type: ignore[assignment]
    return dict(behind.most_common())


def _why(
    e: GpuEvent, compute: Sequence[GpuEvent], by_end: Sequence[GpuEvent], before: GpuEvent | None
) -> str:
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
        idle = ended is None or e.launched > ended.end
        when = "late, when the GPU had nothing else to do" if idle else "just before"
        reasons.append(f"the CPU launched it {when}")
    elif ended is not None and e.begin - ended.end < NEAR_US:
        reasons.append(f"it starts when {_short(ended.name)} ends, whose result it may send")
    after = bisect_left(compute, e.end - NEAR_US, key=lambda c: c.begin)
    reader = compute[after] if after < len(compute) else None
    if reader is not None and reader.begin - e.end < NEAR_US and (reader.launched is None or reader.launched < e.end):
        reasons.append(f"{_short(reader.name)} waits for it")
    return "; ".join(reasons) or "no compute was ready to run meanwhile"
