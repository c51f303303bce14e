"""The experts' load in a run: by expert and step, by rank, its imbalance, and the dropped copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import GREY, INK, PAPER, RANK_COLORS, RED
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.pipeline.expert_load import ExpertLoad

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 4
"""The most layers in one picture: those with the largest imbalance in the last step. The text form has all."""
_SHADES = LinearSegmentedColormap.from_list("load", [PAPER, GREY, INK])


def expert_load(load: ExpertLoad, beside: Sequence[ExpertLoad] = (), *, title: str = "") -> Picture:
    """A row for each layer: its experts over the steps, the last step by rank, the imbalance and the dropped copies.

    beside: runs of the same layers to compare with; the axes and the shades reach as far as their largest values.
    title: names the run, above each row and in the alternative text.
    Text: `table`, and the copies that each rank sent in the last step. WorkbenchError without any step.
    """
    if not load.tokens or not load.layers:
        raise WorkbenchError(
            "no step has recorded the experts' load: run a training step of a model with experts"
        )
    last, ranks = len(load.tokens) - 1, len(load.tokens[0][0])
    worst = sorted(range(len(load.layers)), key=lambda layer: load.imbalance(last, layer))[-MOST:]
    drawn = sorted(worst)
    heading = f"{title}: " if title else ""
    figure = new_figure(9.6, 0.5 + 2.5 * len(drawn))
    grid = figure.subfigures(len(drawn), 1, squeeze=False)
    for layer, row in zip(drawn, grid[:, 0], strict=True):
        panels = row.subplot_mosaic([["steps", "ranks", "uneven"], ["steps", "ranks", "dropped"]],
                                    width_ratios=(1.5, 1.1, 1.1))
        row.suptitle(heading + load.layers[layer], fontsize=10)
        _over_steps(panels["steps"], load, layer)
        _by_rank(panels["ranks"], load, layer)
        _course(
            panels["uneven"],
            [load.imbalance(step, layer) for step in range(last + 1)],
            INK,
            "fullest / mean",
        )
        panels["uneven"].axhline(1, color=GREY, linestyle=":", linewidth=1)
        panels["uneven"].set_ylim(0.9, None)
        panels["uneven"].tick_params(labelbottom=False)
        _course(panels["dropped"], [sum(step[layer]) for step in load.dropped], RED, "dropped")
        panels["dropped"].yaxis.set_major_locator(MaxNLocator(3, integer=True))
        panels["dropped"].set(
            ylim=(0, max(1, *(sum(step[layer]) for step in load.dropped)) * 1.1), xlabel="step"
        )
        if beside:
            _same_scale(panels, [load, *beside], layer)
    lines = [
        f"experts' load of {last + 1} step{'s' * (last > 0)} on {ranks} rank{'s' * (ranks > 1)}: {load.summary()}",
        table(load),
        f"sent in step {last}, by rank",
        *_sent(load, last),
    ]
    if len(drawn) < len(load.layers):
        lines.append(f"drawn: the {len(drawn)} most uneven of {len(load.layers)} layers")
    uneven = "; ".join(f"{load.layers[layer]}: {load.imbalance(0, layer):.2f} in the first step, "
                       f"{load.imbalance(last, layer):.2f} in the last" for layer in drawn)
    alt = (
        f"{heading}Copies of tokens for each expert over {last + 1} step{'s' * (last > 0)}, the last step by rank, "
        f"the imbalance and the dropped copies. The fullest expert over the mean in {uneven}."
    )
    return finish(figure, alt, "\n".join(lines), colors=256)


def _over_steps(axes: Axes, load: ExpertLoad, layer: int) -> None:
    """A column for each step, a row for each expert; darker means more copies."""
    counts = [load.by_expert(step, layer) for step in range(len(load.tokens))]
    shown = axes.imshow(
        [list(row) for row in zip(*counts, strict=True)],
        aspect="auto",
        cmap=_SHADES,
        vmin=0,
        interpolation="nearest",
    )
    axes.set(xlabel="step")
    _whole_steps(axes, len(counts))
    _experts(axes)
    axes.figure.colorbar(shown, ax=axes, shrink=0.9).ax.set_title("copies", fontsize=8)


def _same_scale(panels: Mapping[str, Axes], loads: Sequence[ExpertLoad], layer: int) -> None:
    """Limits with room for the largest value of all loads, as matplotlib would choose them for that one."""
    most = [max(load.by_expert(step, layer)) for load in loads for step in range(len(load.tokens))]
    uneven = max(load.imbalance(step, layer) for load in loads for step in range(len(load.tokens)))
    panels["steps"].images[0].set_clim(0, max(most))
    panels["ranks"].set_xlim(0, 1.05 * max(max(load.by_expert(-1, layer)) for load in loads))
    panels["uneven"].set_ylim(0.9, uneven + 0.05 * (uneven - 1))
    panels["dropped"].set_ylim(
        0, 1.1 * max(1, *(sum(step[layer]) for load in loads for step in load.dropped))
    )


def _by_rank(axes: Axes, load: ExpertLoad, layer: int) -> None:
    """Each expert's copies in the last step, divided by the rank that sent them."""
    ranks = load.tokens[-1][layer]
    count = len(ranks[0])
    parts = ranks if len(ranks) <= len(RANK_COLORS) else [load.by_expert(-1, layer)]
    left = [0] * count
    for rank, sent in enumerate(parts):
        name = f"rank {rank}" if len(parts) == len(ranks) else f"all {len(ranks)} ranks"
        axes.barh(range(count), sent, 0.8, left=left, color=RANK_COLORS[rank] if len(parts) > 1 else GREY,
                  edgecolor=PAPER, linewidth=0.5, label=name)
        left = [a + b for a, b in zip(left, sent, strict=True)]
    axes.axvline(sum(left) / count, color=INK, linestyle=":", linewidth=1.2)
    axes.set(xlabel="copies in the last step; dotted: the mean", ylim=(count - 0.5, -0.5))
    _experts(axes)
    axes.spines[["top", "right"]].set_visible(False)
    if len(parts) > 1:
        axes.legend(frameon=False, fontsize=7.5, handlelength=1, columnspacing=0.8, ncols=4, loc="lower center",
                    bbox_to_anchor=(0.5, 1.0))


def _course(axes: Axes, values: list[float] | list[int], color: str, label: str) -> None:
    axes.plot(range(len(values)), values, color=color, marker="o", markersize=3)
    axes.set_ylabel(label)
    _whole_steps(axes, len(values))
    axes.spines[["top", "right"]].set_visible(False)


def _experts(axes: Axes) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_formatter("e{x:.0f}")


def _whole_steps(axes: Axes, count: int) -> None:
    axes.set_xlim(-0.5, count - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _sent(load: ExpertLoad, step: int) -> list[str]:
    """A line for each layer and rank: its copies for each expert, and how many of them were dropped."""
    return [
        f"{path}, rank {rank}: {' '.join(map(str, sent))}, {load.dropped[step][layer][rank]} dropped"
        for layer, path in enumerate(load.layers)
        for rank, sent in enumerate(load.tokens[step][layer])
    ]


def table(load: ExpertLoad) -> str:
    """A line for each step and layer: copies for each expert, the fullest over the mean, and dropped copies."""
    count = len(load.tokens[0][0][0]) if load.tokens else 0
    lines = [
        f"{'step':>4}  {'layer':<12}"
        + "".join(f"{f'e{i}':>7}" for i in range(count))
        + "  max/mean  dropped"
    ]
    for step in range(len(load.tokens)):
        for layer, path in enumerate(load.layers):
            counts = "".join(f"{n:>7}" for n in load.by_expert(step, layer))
            fell = sum(load.dropped[step][layer])
            lines.append(
                f"{step:>4}  {path:<12}{counts}{load.imbalance(step, layer):>10.2f}{fell:>9}"
            )
    return "\n".join(lines)
