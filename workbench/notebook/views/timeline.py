"""A step over time, to zoom into."""

from __future__ import annotations

from typing import Any

from workbench.graph.read.simulated_run import COMPUTE, Span, StepTimeline
from workbench.notebook.draw.timeline import FREE, What, lane_colors, runs_of
from workbench.notebook.views.controls import Zoomed
from workbench.torch_api.garbage import uncollected


class TimelineView(Zoomed):
    """Compute and each process group on a lane of its own; of a pass's record, before and after it."""

    @uncollected()
    def __init__(self, what: What):
        runs = runs_of(what)
        super().__init__("timeline", "timeline", {
            "runs": [_drawn(name, run) for name, run in runs.items()],
            "colors": lane_colors(lane for run in runs.values() for lane in run.lanes)})
        end = max(run.total_ms for run in runs.values()) or 1.0
        self.zoom(end, description="ms", readout_format=".3f")


def _drawn(title: str, run: StepTimeline) -> dict[str, Any]:
    return {
        "title": f"{title}: {run.total_ms:,.2f} ms, {run.exposed_ms:,.2f} ms exposed ({run.source})",
        "lanes": run.lanes,
        "total_ms": run.total_ms,
        "exposed_ms": run.exposed_ms,
        "fates": run.fates(),
        "spans": bars(run),
    }


def bars(run: StepTimeline) -> list[tuple[Any, ...]]:
    """(lane, name, begin, end, exposed, limit, label, part). Where exposed collectives overlap, each has all of it.

    Adjacent kernels of one module are one bar.
    """
    rows: list[tuple[Any, ...]] = []
    open_: list[Span] = []

    def close() -> None:
        if open_:
            name = (
                open_[0].name if len(open_) == 1 else f"{len(open_)} kernels from {open_[0].name}"
            )
            rows.append((COMPUTE, name, _round(open_[0].begin), _round(open_[-1].end), 0, "", open_[0].label,
                          open_[0].part))
            open_.clear()

    for span in run.spans:
        if span.lane != COMPUTE:
            continue
        if open_ and (span.label != open_[0].label or span.begin > open_[-1].end + 1e-9):
            close()
        open_.append(span)
    close()
    return rows + [(s.lane, s.name, _round(s.begin), _round(s.end), 0 if s.limit in FREE else _round(s.exposed),
                     s.limit, s.label, s.part) for s in run.collectives]


def _round(ms: float) -> float:
    return round(ms, 6)
