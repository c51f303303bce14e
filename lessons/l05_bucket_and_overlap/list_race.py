"""Lists of passes against each other: tokens and link on sliders, and a map of which list is fastest where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import traitlets
from ipywidgets import IntSlider

from workbench.errors import WorkbenchError
from workbench.graph.read.simulated_run import StepTimeline
from workbench.notebook.draw.picture import Table, table
from workbench.notebook.moments.moment import Moment

CLOSE = " ?"
Runs = Mapping[tuple[int, int], Mapping[str, StepTimeline]]


class ListRace(Moment):
    """`tokens` and `link_speed` choose a place on the map, by their numbers on the axes.

    `figures`: the step of each list there, in simulated milliseconds.

    runs: the simulated step of each list, by tokens of a rank and GB/s of its link; every pair of them is there.
    colors: of the lists. margin: how far a simulated step may be off, in milliseconds: a list that leads by less may
    not be the fastest.
    """

    tokens, link_speed = (traitlets.Int().tag(sync=True) for _ in range(2))

    def __init__(self, runs: Runs, colors: Sequence[str], *, margin: Callable[[StepTimeline], float]):
        axes = [sorted({key[i] for key in runs}) for i in range(2)]
        missing = [(a, b) for a in axes[0] for b in axes[1] if (a, b) not in runs]
        names = list(next(iter(runs.values()), ()))
        if missing or not runs or any(list(found) != names for found in runs.values()) or len(colors) < len(names):
            raise WorkbenchError("ListRace takes the same lists for every pair of tokens and link, and a colour for "
                                 "each list" + (f": {missing[0]} is missing" if missing else ""))
        self.runs, self.axes, self.margin = runs, axes, margin
        super().__init__("race", "which list is fastest", {
            "axes": axes, "names": names, "colors": list(colors)[:len(names)],
            "runs": {f"{a} {b}": {name: [run.compute_ms, run.exposed_ms, run.total_ms] for name, run in found.items()}
                     for (a, b), found in runs.items()},
            "winners": {f"{a} {b}": self.winner(a, b) for a, b in runs}}, tokens=len(axes[0]) // 2,
            link_speed=len(axes[1]) // 2)
        self._moved()
        self.add(*(self.link(name, IntSlider(max=len(axis) - 1, description=label, readout=False))
                   for name, label, axis in zip(("tokens", "link_speed"), ("tokens", "link, GB/s"), axes, strict=True)))

    def winner(self, tokens: int, gbps: int) -> str:
        """The list with the shortest step, and CLOSE where another one's is longer by less than the margin."""
        found = self.runs[tokens, gbps]
        best, *others = sorted(found, key=lambda name: found[name].total_ms)
        limit = found[best].total_ms + self.margin(found[best])
        return best + CLOSE * any(found[name].total_ms < limit for name in others)

    def picture(self) -> Table:
        tokens, links = self.axes
        rows = [(f"{gbps:,} GB/s", *(self.winner(each, gbps) for each in tokens)) for gbps in reversed(links)]
        return table(self.title, ("link", *(f"{each:,} tokens" for each in tokens)), rows,
                     "?: it leads by less than the model's error")

    @traitlets.observe("tokens", "link_speed")
    def _moved(self, _: Any = None) -> None:
        tokens, links = self.axes
        found = self.runs[tokens[self.tokens], links[self.link_speed]]
        self.figures = {name: run.total_ms for name, run in found.items()}
