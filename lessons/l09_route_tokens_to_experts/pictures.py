"""The experts of each token, the slots that travel, and the all-to-alls of a step."""

from __future__ import annotations

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from workbench.graph.capture import JointGraph
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.nodes import provenance
from workbench.notebook.draw.colors import INK, PAPER
from workbench.notebook.draw.picture import Picture, Table, finish, new_figure
from workbench.recipe.wording import counted
from workbench.world.simulated import shards
from workbench_lessons.l09_route_tokens_to_experts.slots import rank_color, slots

GREYS = LinearSegmentedColormap.from_list("scores", [PAPER, "#b0b7bd"])


def routing(scores: torch.Tensor, experts: torch.Tensor) -> Picture:
    """Scores from 0 to 1 (tokens, experts) of each rank, in thousandths, and in colour the choices (tokens, top_k).

    The colour is the token's rank. The ranks hold equal parts of the experts, in order.
    """
    each, chosen = shards(scores), shards(experts)
    count, size = each[0].shape[1], len(each)
    rows = [(rank, token) for rank, own in each.items() for token in range(own.shape[0])]
    figure = new_figure(1.2 + 0.55 * count, 0.9 + 0.2 * len(rows))
    axes = figure.add_subplot()
    axes.imshow(torch.cat(list(each.values())).tolist(), cmap=GREYS, vmin=0, aspect="auto")
    title = f"{counted(len(rows), 'token')} on {counted(size, 'rank')}, {counted(count, 'expert')}"
    lines = [f"{title}: the experts of each token, best first"]
    for y, (rank, token) in enumerate(rows):
        picked = chosen[rank][token].tolist()
        for expert in picked:
            axes.add_patch(Rectangle((expert - 0.47, y - 0.43), 0.94, 0.86, facecolor=rank_color(rank)))
        for expert, score in enumerate(each[rank][token].tolist()):
            box = {"facecolor": PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 0.8} if expert in picked else None
            axes.text(expert, y, f"{1000 * score:.0f}", ha="center", va="center", fontsize=7.5, color=INK, bbox=box)
        lines.append(f"rank {rank}, token {y}: {', '.join(f'e{e}' for e in picked)}")
    ends = [y for y in range(1, len(rows)) if rows[y][0] != rows[y - 1][0]]
    for edge in ends:
        axes.axhline(edge - 0.5, color=INK, linewidth=0.8, linestyle=":")
    held = [f"e{e}\nrank {e * size // count}" for e in range(count)]
    axes.set_xticks(range(count), held, fontsize=7.5)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(rows)), list(map(str, range(len(rows)))), fontsize=7.5)
    for rank, a, b in zip(each, [0, *ends], [*ends, len(rows)], strict=True):
        axes.text(-0.05, (a + b - 1) / 2, f"rank {rank}", transform=axes.get_yaxis_transform(), ha="right",
                  va="center", fontsize=9)
    axes.tick_params(length=0)
    return finish(figure, "Scores of tokens against experts, the chosen ones in the colour of the token's rank. "
                          f"{lines[0]}.", "\n".join(lines), colors=256)


def exchange(sent: torch.Tensor, received: torch.Tensor, capacity: int, per_rank: int) -> Picture:
    """Each rank's slots before and after an all-to-all, with the numbers of the tokens in them, or -1."""
    size = len(shards(sent))
    of_rank = sent.numel() // capacity // size
    experts = [f"e{n}" for n in range(size * of_rank)]
    places = [f"rank {n}: {', '.join(experts[n * of_rank : (n + 1) * of_rank])}" for n in range(size)]
    ranks = [f"rank {n}" for n in range(size)]
    return slots([("sent: a box for each expert", sent),
                  ("received: from each rank, a box for each of the row's experts", received)],
                 capacity, per_rank, heads=(experts, [f"from {rank}" for rank in ranks]), rows=(ranks, places))


def all_to_alls(joint: JointGraph) -> Table:
    """The all-to-alls of a captured step, in node order."""
    nodes = {node.name: node for node in joint.graph.graph.nodes}
    rows = []
    for c in list_collectives(joint.graph):
        if c.kind == "all_to_all":
            node = nodes[c.node]
            direction = "backward" if provenance(node).backward else "forward"
            rows.append((direction, node.meta["custom"]["region"], list(c.shape), str(c.dtype), c.bytes_in))
    columns = "direction", "region", "rows x dim", "dtype", "bytes"
    return Table("all-to-alls of a step, in order", columns, tuple(rows))
