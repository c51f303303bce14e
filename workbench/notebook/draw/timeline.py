"""A step over time: compute and one lane for each process group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.graph.facts import Known
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.simulated_run import BEHIND_OTHERS, COMPUTE, HIDDEN, StepTimeline, simulated
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, ORANGE, PAPER, PINK, RED, SKY, YELLOW
from workbench.notebook.draw.graphs import by_title
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.pipeline.gpu_communication import union
from workbench.recipe.contracts import Stage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {COMPUTE: BLUE, "dp_shard": ORANGE, "dp_shard.gather": YELLOW, "tp": GREEN, "ep": PINK,
           "dp_replicate": SKY, "ep_shard": "#8c564b"}
FREE = HIDDEN, BEHIND_OTHERS
_EDGE = "#8b0000"  # of an exposed collective: it must show on every lane's colour
_WAITS: dict[str, Any] = {"facecolor": "#fbe3d4", "edgecolor": RED, "hatch": "////", "linewidth": 0}
What = GraphModule | ForwardBackward | PassRecord | StepTimeline | Mapping[str, StepTimeline]


def simulated_as_run(
    graphs: GraphModule | Mapping[str, GraphModule],
    device: str | DeviceSpec,
    *,
    compiled: bool,
    replayed: bool | None,
) -> StepTimeline:
    """`simulated`, charged as the graphs run: fused kernels where they are `compiled`, and the CPU's launches.

    The launches are as measured of the device; none are charged on a device without, or where `replayed` is None: not
    known.
    """
    if replayed is None:
        return simulated(graphs, device, fused=compiled)
    launch, view = device_spec(device).launching_us(compiled=compiled)
    return simulated(
        graphs, device, fused=compiled, launch_us=launch, view_us=view, replayed=replayed
    )


def runs_of(
    what: What, device: str | DeviceSpec = "h100", known: Known | None = None
) -> dict[str, StepTimeline]:
    """The runs to draw, by title: of a pass's record, before and after it; given runs stay as they are.

    known: of the run that the graphs are of, which tells how they are launched; a record has it.
    """
    if isinstance(what, StepTimeline):
        return {what.source: what}
    if isinstance(what, Mapping):
        return dict(what)
    known = what.known if isinstance(what, PassRecord) else known or Known()
    compiled = known.has_pass_of(Stage.LOWERING)
    replayed = known.has_pass_of(Stage.REPLAY) if known.built else None
    return {title: simulated_as_run(graphs, device, compiled=compiled, replayed=replayed)
            for title, graphs in by_title(what, "step").items()}


def timeline(what: What, device: str | DeviceSpec = "h100") -> Picture:
    """Simulated by the cost model, before and after a pass; or measured, where `what` is a measured StepTimeline.

    Each process group has its own colour, as in the views. Hatched parts of the compute lane wait for a collective:
    exposed communication. Such a collective has a red edge; one that is concurrent with it has none. Text: how many
    collectives of each lane have which limit.
    """
    runs = runs_of(what, device)
    colors = lane_colors(lane for run in runs.values() for lane in run.lanes)
    order = list(colors)
    lanes = [sorted(run.lanes, key=order.index) for run in runs.values()]
    heights = [0.55 + 0.34 * len(run_lanes) for run_lanes in lanes]
    figure, shown = panels(9.6, 0.75 + sum(heights), len(runs), sharex=True, height_ratios=heights)
    lines = []
    for axes, (title, run), run_lanes in zip(shown, runs.items(), lanes, strict=True):
        _panel(axes, run, run_lanes, colors)
        axes.set_title(
            f"{title}: {run.total_ms:,.2f} ms, {run.exposed_ms:,.2f} ms of communication exposed",
            fontsize=9.5,
            loc="left",
        )
        lines += _lines(title, run)
    # after all: it ends the scaling, also of the panels that share the axis
    shown[-1].set_xlim(left=0)
    legend = [*(Patch(color=color, label=lane) for lane, color in colors.items()),
              Patch(**_WAITS, label="compute waits: exposed"),
              Patch(facecolor=PAPER, edgecolor=_EDGE, label="exposed collective")]
    figure.legend(handles=legend, loc="outside upper right", ncols=min(len(legend), 6), fontsize=8, frameon=False)
    shown[-1].set_xlabel("ms, " + "; ".join(dict.fromkeys(run.source for run in runs.values())))
    return finish(figure, "A timeline with a lane for compute and one for each process group. "
                  + "; ".join(lines) + ".", "\n".join(lines), colors=48)


def lane_colors(lanes: Iterable[str]) -> dict[str, str]:
    """The same colour for a mesh axis's process group in every picture. Other groups get the colours that are left, in
    their order, and grey when none is.
    """
    colors = {lane: _COLORS.get(lane, "") for lane in lanes}
    left = [color for color in _COLORS.values() if color != BLUE and color not in colors.values()]
    return {lane: color or (left.pop(0) if left else GREY) for lane, color in colors.items()}


def _panel(axes: Axes, run: StepTimeline, lanes: Sequence[str], colors: Mapping[str, str]) -> None:
    work = bars((s.begin, s.end) for s in run.spans if s.lane == COMPUTE)
    axes.broken_barh(work, (-0.4, 0.8), color=BLUE, linewidth=0)
    waits = [(s.end - s.exposed, s.exposed) for s in run.collectives if s.limit not in FREE]
    axes.broken_barh(waits, (-0.4, 0.8), **_WAITS)
    for i, lane in enumerate(lanes[1:], 1):
        for edge, shown in (("none", False), (_EDGE, True)):
            spans = [
                (s.begin, s.ms)
                for s in run.spans
                if s.lane == lane and (s.limit not in FREE) == shown
            ]
            axes.broken_barh(
                spans, (i - 0.4, 0.8), facecolor=colors[lane], edgecolor=edge, linewidth=1.5
            )
    axes.set_yticks(range(len(lanes)), list(lanes), fontsize=9)
    axes.set(ylim=(len(lanes) - 0.2, -0.55))
    late = next((s.begin for s in run.spans if s.part == "backward"), None)
    if late:
        axes.axvline(late, color=GREY, linewidth=0.9, linestyle="--")
        axes.annotate("backward", (late, 0), (2, 0), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=7.5, va="bottom", style="italic", color="#555555")


def bars(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(begin, length) of (begin, end) intervals, for `broken_barh`; adjacent intervals become one bar."""
    return [(begin, end - begin) for begin, end in union(spans, near=1e-9)]


def _lines(title: str, run: StepTimeline) -> list[str]:
    said = f"{title}: {run}" if run.source.startswith("simulated") else f"{title}: {run.source}"
    lines = [said]
    by_lane: dict[str, Counter[str]] = {}
    for span in run.collectives:
        by_lane.setdefault(span.lane, Counter())[span.limit or "not matched"] += 1
    return lines + [
        f"  {lane}: "
        + ", ".join(
            f"{n} {limit}" if limit in FREE else f"{n} exposed ({limit})"
            for limit, n in sorted(limits.items())
        )
        for lane, limits in by_lane.items()
    ]
