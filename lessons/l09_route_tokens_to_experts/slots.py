"""The slots in which copies of tokens travel between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from matplotlib.patches import Patch, Rectangle

from workbench.notebook.draw.colors import FAINT, INK, PAPER, RANK_COLORS
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.world.simulated import shards

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def slots(
    buffers: Sequence[tuple[str, torch.Tensor]], capacity: int, per_rank: int, owner: str = "rank",
    heads: Sequence[Sequence[str]] = (), rows: Sequence[Sequence[str]] = (),
) -> Picture:
    """One panel for each of `buffers`, (title, slots int64): a slot holds the number of a token, or -1 for none.

    Rank r's tokens have numbers from r * per_rank on; the colour is the rank of the token. owner: "sequence" where
    token numbers and colours tell sequences apart instead. heads, rows: for each panel its columns' and rows' names.
    """
    each = [(title, shards(buffer)) for title, buffer in buffers]
    wide = max(own.numel() for _, held in each for own in held.values())
    color_of = rank_color if owner == "rank" else _of_sequence
    low = (0.85 if owner == "sequence" else 0.55) + 0.2 * len(heads)  # 0.85: a legend
    figure = new_figure(
        min(1.2 + 0.36 * wide, 13), low + sum(0.45 + 0.33 * len(held) for _, held in each)
    )
    panels = figure.subplots(len(each), 1, squeeze=False)[:, 0]
    lines = []
    for panel, (axes, (title, held)) in enumerate(zip(panels, each, strict=True)):
        lines.append(title)
        for row, (rank, own) in enumerate(held.items()):
            _row(axes, row, own.tolist(), capacity, per_rank, color_of)
            boxes = [" ".join("." if n < 0 else str(n) for n in box)
                     for box in own.unflatten(0, (-1, capacity)).tolist()]
            lines.append(f"rank {rank}: {' | '.join(boxes)}")
        axes.set(xlim=(-0.1, wide + 0.1), ylim=(len(held), -0.1), xticks=[])
        labels = rows[panel] if rows else [f"rank {rank}" for rank in held]
        axes.set_yticks([row + 0.45 for row in range(len(held))], labels, fontsize=9)
        if owner == "rank":
            for label, rank in zip(axes.get_yticklabels(), held, strict=True):
                label.set_bbox(
                    {"facecolor": rank_color(rank), "edgecolor": "none", "alpha": 0.6, "pad": 1.5}
                )
        if heads:
            names = heads[panel]
            axes.set_xticks(
                [wide * (i + 0.5) / len(names) for i in range(len(names))], names, fontsize=8
            )
            axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[:].set_visible(False)
    if owner == "sequence":
        last = max(int(own.max()) for _, held in each for own in held.values()) // per_rank
        handles = [
            Patch(facecolor=color_of(number), label=f"sequence {number}")
            for number in range(last + 1)
        ]
        figure.legend(
            handles=handles, loc="outside lower left", ncols=last + 1, frameon=False, fontsize=8
        )
    alt = (
        "Slots of each rank, with the numbers of the tokens in them; a token has the colour of its "
        + owner
        + ". "
    )
    return finish(
        figure, alt + "; ".join(title for title, _ in each) + ".", "\n".join(lines), colors=256
    )


def _row(
    axes: Axes,
    row: int,
    held: list[int],
    capacity: int,
    per_rank: int,
    color_of: Callable[[int], str],
) -> None:
    """One rank's slots, with a frame around those of one expert from one rank."""
    for at, number in enumerate(held):
        color = FAINT if number < 0 else color_of(number // per_rank)
        axes.add_patch(Rectangle((at, row), 1, 0.9, facecolor=color, edgecolor=PAPER))
        if number >= 0:
            axes.text(at + 0.5, row + 0.45, str(number), ha="center", va="center", fontsize=8, color=INK,
                      bbox={"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 1})
    for start in range(0, len(held), capacity):
        axes.add_patch(
            Rectangle(
                (start + 0.04, row), capacity - 0.08, 0.9, fill=False, edgecolor=INK, linewidth=0.9
            )
        )


def rank_color(rank: int) -> str:
    """The colour of a rank in pictures of tokens."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def _of_sequence(number: int) -> str:
    """The palette from its middle on: a sequence has none of the colours of the first ranks."""
    return rank_color(number + 3)
