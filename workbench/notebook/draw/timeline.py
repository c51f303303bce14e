"""A step over time: compute and one lane for each process group, or CPU launches above the device's work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch.fx import GraphModule

from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.facts import Known
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.cost import DeviceSpec, device_spec
from workbench.graph.read.simulated_run import BEHIND_OTHERS, COMPUTE, HIDDEN, StepTimeline, simulated
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, ORANGE, PAPER, PINK, RED, SKY, YELLOW
from workbench.notebook.draw.graphs import by_title
from workbench.notebook.draw.launch_bound import Pace
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
COUNTABLE = 60  # launches that are drawn one by one, with white edges; more of them are one bar
What = (GraphModule | ForwardBackward | PassRecord | StepTimeline | Sequence[StepTimeline]
        | Mapping[str, GraphModule] | Mapping[str, StepTimeline])


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
    launch, view = (
        (0.0, 0.0) if replayed is None else device_spec(device).launching_us(compiled=compiled)
    )
    return simulated(
        graphs, device, fused=compiled, launch_us=launch, view_us=view, replayed=bool(replayed)
    )


def runs_of(
    what: What, device: str | DeviceSpec = "h100", known: Known | None = None
) -> dict[str, StepTimeline]:
    """The runs to draw, by title: of a pass's record, before and after it; given runs stay as they are.

    known: of the run that the graphs are of, which tells how they are launched; a record has it.
    """
    if isinstance(what, StepTimeline):
        return {what.source: what}
    if isinstance(what, GraphModule | ForwardBackward | PassRecord):
        known = what.known if isinstance(what, PassRecord) else known or Known()
        replayed = known.has_pass_of(Stage.REPLAY) if known.built else None
        return {
            title: simulated_as_run(
                graphs, device, compiled=known.has_pass_of(Stage.LOWERING), replayed=replayed
            )
            for title, graphs in by_title(what, "step").items()
        }
    if isinstance(what, Mapping):
        if runs := {title: run for title, run in what.items() if isinstance(run, StepTimeline)}:
            return runs
        return {
            "step": simulated(
                {part: gm for part, gm in what.items() if isinstance(gm, GraphModule)}, device
            )
        }
    return {f"{i}: {run.source}": run for i, run in enumerate(what, 1)}


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
    heights = [0.55 + 0.34 * len(own) for own in lanes]
    figure, shown = panels(9.6, 0.75 + sum(heights), len(runs), sharex=True, height_ratios=heights)
    lines = []
    for axes, (title, run), own in zip(shown, runs.items(), lanes, strict=True):
        _panel(axes, run, own, colors)
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
    found = {lane: _COLORS.get(lane, "") for lane in lanes}
    left = [color for color in _COLORS.values() if color != BLUE and color not in found.values()]
    return {lane: color or (left.pop(0) if left else GREY) for lane, color in found.items()}


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
            for limit, n in sorted(found.items())
        )
        for lane, found in by_lane.items()
    ]


def pace(paces: Mapping[str, Pace], *, one_scale: bool = True) -> Picture:
    """A panel for each step, under its title: launches above, the device's work below; work before a part is grey.

    Raises WorkbenchError without any step.
    """
    if not paces:
        raise WorkbenchError(
            'draw.pace: give one step or more, by title: {"node by node": paced(...)}'
        )
    figure, shown = panels(
        9.6, 0.95 + (1.15 if one_scale else 1.35) * len(paces), len(paces), sharex=one_scale
    )
    end = 1.03 * max(found.step_us for found in paces.values())
    lines = []
    for axes, (title, found) in zip(shown, paces.items(), strict=True):
        apart = 2 < found.launches <= COUNTABLE
        started = (
            [(begin, stop - begin) for begin, stop in found.started]
            if apart
            else bars(found.started)
        )
        axes.broken_barh(
            started, (-0.38, 0.76), facecolor=ORANGE, edgecolor=PAPER, linewidth=0.6 if apart else 0
        )
        axes.broken_barh(
            [(0, found.step_us)], (0.62, 0.76), facecolor=PAPER, edgecolor=GREY, linewidth=0.6
        )
        # an edge would fill the gaps; without snap, a bar thinner than a pixel is a paler one, and none is lost
        for color, begin, stop in (
            (GREY, 0, found.before_us),
            (BLUE, found.before_us, found.step_us),
        ):
            own = [(max(since, begin), min(until, stop)) for since, until in found.worked
                   if since < stop and until > begin]
            axes.broken_barh(bars(own), (0.62, 0.76), facecolor=color, linewidth=0, snap=False)
        axes.axvline(found.step_us, color=INK, linewidth=1.6)
        axes.set_yticks([0, 1], ["CPU launches", "device"], fontsize=9)
        axes.set(ylim=(1.5, -0.5), xlim=(0, end if one_scale else 1.03 * found.step_us))
        axes.set_title(f"{title}: {found}", fontsize=9, loc="left", color=INK)
        lines.append(f"{title}: {found}")
    first = next(iter(paces.values()))
    before = [Patch(color=GREY, label=f"work before the {first.what}")] if first.before_us else []
    works = f"work of the {first.what}" if first.before_us else "the device works"
    legend = [
        Patch(color=ORANGE, label="the CPU launches"),
        *before,
        Patch(color=BLUE, label=works),
        Patch(facecolor=PAPER, edgecolor=GREY, label="the device waits"),
        Line2D([], [], color=INK, linewidth=1.6, label=f"end of the {first.what}"),
    ]
    figure.legend(
        handles=legend, loc="outside upper right", ncols=len(legend), fontsize=8, frameon=False
    )
    for axes in shown if first.before_us else ():
        axes.xaxis.set_major_formatter(lambda us, _: f"{us / 1e3:g}")
    shown[-1].set_xlabel(f"{'ms' if first.before_us else 'µs'}, {first.source}", fontsize=9)
    text = [f"pace of a {first.what}, {first.source}", *lines]
    return finish(
        figure,
        "Launches of the CPU above the device's work, on one clock. " + "; ".join(lines) + ".",
        "\n".join(text),
    )
