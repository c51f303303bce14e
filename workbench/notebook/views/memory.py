"""Live bytes along the graphs, to zoom into."""

from __future__ import annotations

from typing import Any

import traitlets
from ipywidgets import FloatRangeSlider
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.partition import ForwardBackward
from workbench.notebook.draw.memory import CURVES, Live, begins, live_of
from workbench.notebook.views.controls import OwnData
from workbench.torch_api.garbage import uncollected

POINTS = 3000


class MemoryView(OwnData):
    """Estimated bytes alive in node order; of a pass's record, before and after it.

    `window`: from where to where is shown.
    """

    window = traitlets.Tuple(traitlets.Float(), traitlets.Float(), default_value=(0.0, 0.0)).tag(
        sync=True
    )

    @uncollected()
    def __init__(
        self,
        what: GraphModule | ForwardBackward | PassRecord,
        measured: int | None = None,
        title: str = "memory",
    ):
        lives = live_of(what)
        _, top = list(lives.values())[-1].peak
        super().__init__("memory", title, {
            "measured": measured, "curves": [curve(*each) for each in lives.items()], "colors": CURVES[-len(lives):],
            "begins": begins(lives), "holders": top.holders})
        end = float(max(len(live.curve) for live in lives.values()))
        self.window = (0.0, end)
        slider = FloatRangeSlider(
            max=end, step=end / 1000, description="nodes", readout_format=".0f"
        )
        self.add(self.link("window", slider))


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
