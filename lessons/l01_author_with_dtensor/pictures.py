"""What a change of placements sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.tensor import DTensor, Placement

from workbench.notebook.draw.colors import INK
from workbench.notebook.draw.picture import Picture, Table, finish, new_figure, table
from workbench.notebook.views.placement import words
from workbench_lessons.l01_author_with_dtensor.redistribution import Move, redistribution
from workbench_lessons.l01_author_with_dtensor.slices import draw_parts, holdings


def redistribute(tensor: DTensor, placements: Sequence[Placement], name: str = "tensor") -> Picture:
    """The collectives of a change of placements, with the bytes of one rank; see `redistribution`."""
    moves = redistribution(tensor, placements)
    figure = new_figure(9.6, 3.2)
    before, between, after = figure.subplots(1, 3, width_ratios=(1, 0.8, 1))
    titles = (words(tensor), words(tensor, placements))
    held = [draw_parts(axes, tensor, placed) for axes, placed in ((before, tensor.placements), (after, placements))]
    figure.suptitle(f"{name}  {list(tensor.shape)}", fontsize=10)
    for axes, title in zip((before, after), titles, strict=True):
        axes.set_title(title.replace(", ", ",\n"), fontsize=9)
    between.axis("off")
    between.set(xlim=(0, 1), ylim=(0, 1))
    between.annotate("", (1, 0.5), (0, 0.5), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1.5})
    text = "\n".join(f"{m.kind.replace('_', '-')} over {m.axis}\n{m.bytes_in:,} B in, {m.bytes_out:,} B out"
                     for m in moves) or "no collective:\neach rank has its part"
    between.text(0.5, 0.55, text, ha="center", va="bottom", fontsize=9, color=INK)
    lines = [f"{name} {list(tensor.shape)}", f"before: {titles[0]}", *map(str, moves)]
    lines += ["no collective"] * (not moves) + [f"after: {titles[1]}", *holdings(held[1])]
    return finish(figure, "What a change of placements sends. " + "; ".join(lines) + ".", "\n".join(lines))


def move_table(moves: Mapping[tuple[Placement, Placement], Sequence[Move]]) -> Table:
    """A row for each change from one placement to another: its collectives, and the bytes of one rank."""
    rows = []
    for (start, wanted), sent in moves.items():
        kinds = ", ".join(move.kind.replace("_", "-") for move in sent) or "none"
        figures = (sum(getattr(move, side) for move in sent) for side in ("bytes_in", "bytes_out", "counted"))
        rows.append((str(start), str(wanted), kinds, *figures))
    columns = ("from", "to", "collective", "bytes in", "bytes out", "costs")
    return table("a float32 tensor of [8, 8] on 4 ranks", columns, rows)
