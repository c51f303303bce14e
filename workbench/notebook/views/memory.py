"""Live bytes along the graphs, to zoom into."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.partition import ForwardBackward
from workbench.notebook.draw.memory import CURVES, Live, begins, live_of
from workbench.notebook.views.controls import Zoomed
from workbench.torch_api.garbage import uncollected

POINTS = 3000


class MemoryView(Zoomed):
    """Estimated bytes alive in node order; of a pass's record, before and after it."""

    @uncollected()
    def __init__(
        self, what: GraphModule | ForwardBackward | PassRecord, measured: int | None = None
    ):
        lives = live_of(what)
        _, top = list(lives.values())[-1].peak
        super().__init__("memory", "memory", {
            "measured": measured, "curves": [curve(*item) for item in lives.items()], "colors": CURVES[-len(lives):],
            "begins": begins(lives), "holders": top.holders})
        end = float(max(len(live.curve) for live in lives.values()))
        self.zoom(end, description="nodes", readout_format=".0f")


def curve(title: str, live: Live) -> dict[str, Any]:
    """At most `POINTS` points (place, bytes, node): the highest of each stretch, so that no peak is lost."""
    nodes = [name for profile in live.parts.values() for name in profile.nodes]
    points = [(i, size, name) for i, (size, name) in enumerate(zip(live.curve, nodes, strict=True))]
    stretch = -(-len(points) // POINTS) or 1
    kept = [
        max(points[i : i + stretch], key=lambda p: p[1]) for i in range(0, len(points), stretch)
    ]
    at, peak, name = max(points, key=lambda p: p[1])
    return {"title": title, "points": kept, "peak": peak, "peak_at": at, "peak_node": name}
