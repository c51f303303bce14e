"""The experts of each token."""

from __future__ import annotations

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import INK, PAPER
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.world.simulated import shards
from workbench_lessons.l09_route_tokens_to_experts.slots import rank_color

GREYS = LinearSegmentedColormap.from_list("scores", [PAPER, "#b0b7bd"])


def routing(scores: torch.Tensor, experts: torch.Tensor, n_groups: int = 1) -> Picture:
    """Scores from 0 to 1 (tokens, experts) of each rank, in hundredths, and in colour the choices (tokens, top_k).

    The colour is the rank that holds the expert, if ranks hold equal parts in order. Lines separate the groups.
    """
    each, chosen = shards(scores), shards(experts)
    count, size = each[0].shape[1], len(each)
    if count % size or count % n_groups:
        raise WorkbenchError(f"{count} experts do not divide by ranks ({size}) and groups ({n_groups})")
    rows = [(rank, token) for rank, own in each.items() for token in range(own.shape[0])]
    figure = new_figure(1.2 + 0.55 * count, 0.9 + 0.2 * len(rows))
    axes = figure.add_subplot()
    axes.imshow(torch.cat(list(each.values())).tolist(), cmap=GREYS, vmin=0, aspect="auto")
    sizes = ((len(rows), "token"), (size, "rank"), (count, "expert"), (n_groups, "group"))
    said = [f"{n} {what}{'s' * (n > 1)}" for n, what in sizes]
    lines = [f"{said[0]} on {said[1]}, {said[2]} in {said[3]}: the experts of each token, best first"]
    for y, (rank, token) in enumerate(rows):
        picked = chosen[rank][token].tolist()
        for expert in picked:
            color = rank_color(expert * size // count)
            axes.add_patch(Rectangle((expert - 0.47, y - 0.43), 0.94, 0.86, facecolor=color))
        for expert, score in enumerate(each[rank][token].tolist()):
            box = {"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 0.8} if expert in picked else None
            axes.text(expert, y, f"{100 * score:.0f}", ha="center", va="center", fontsize=7.5, color=INK, bbox=box)
        lines.append(f"rank {rank}, token {y}: {', '.join(f'e{e}' for e in picked)}")
    for edge in range(count // n_groups, count, count // n_groups):
        axes.axvline(edge - 0.5, color=INK, linewidth=1.2)
    ends = [y for y in range(1, len(rows)) if rows[y][0] != rows[y - 1][0]]
    for edge in ends:
        axes.axhline(edge - 0.5, color=INK, linewidth=0.8, linestyle=":")
    held = [f"e{e}\nrank {e * size // count}" for e in range(count)]
    axes.set_xticks(range(count), held, fontsize=7.5)
    axes.xaxis.tick_top()
    for label, expert in zip(axes.get_xticklabels(), range(count), strict=True):
        label.set_bbox({"facecolor": rank_color(expert * size // count), "edgecolor": "none", "alpha": 0.6, "pad": 1.5})
    axes.set_yticks(range(len(rows)), list(map(str, range(len(rows)))), fontsize=7.5)
    for rank, a, b in zip(each, [0, *ends], [*ends, len(rows)], strict=True):
        axes.text(-0.05, (a + b - 1) / 2, f"rank {rank}", transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=9)
    axes.tick_params(length=0)
    return finish(figure, "Scores of tokens against experts, the chosen ones in the colour of the rank that holds the "
                          f"expert. {lines[0]}.", "\n".join(lines), colors=256)
