"""Each all-gather of a parameter as a box, in the order of the graph: its module, or that it has none."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import commonpath

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch
from torch.fx import GraphModule, Node

from workbench.graph.read.memory import Flow, parameter_gathers
from workbench.graph.read.nodes import is_backward, provenance
from workbench.notebook.draw.colors import GREY, INK, PAPER, RED
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.recipe.wording import counted

FILL = "#f8e0d2"  # RED, the colour of collectives, as a background
_LABEL, _BOX, _ROW = 1.75, 0.86, 0.5  # inches


def gather_order(graphs: Mapping[str, GraphModule], title: str = "all-gathers of the forward") -> Picture:
    """A row for each graph. A gather of several weights, a bucket, is as wide as their own gathers would be.

    The legend below tells the kinds of box that are drawn. Text: the boxes of each row.
    """
    rows = {name: [_box(node, weights) for node, weights in _gathers(gm)] for name, gm in graphs.items()}
    most = max(1, *(sum(wide for _, wide in boxes) for boxes in rows.values()))
    width, height = _LABEL + _BOX * most + 0.95, 0.75 + _ROW * len(rows)
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(-height, 0))
    axes.axis("off")
    axes.text(_LABEL, -0.16, f"{title}: first to last, left to right", va="center", fontsize=9, color=INK)
    lines = [title]
    for i, (name, boxes) in enumerate(rows.items()):
        y, x = -0.4 - _ROW * (i + 0.5), _LABEL
        axes.text(x - 0.12, y, name, ha="right", va="center", fontsize=9, color=INK)
        for text, wide in boxes:
            _frame(axes, x + 0.03, y, _BOX * wide - 0.06, 0.34, text != "no module")
            axes.text(x + _BOX * wide / 2, y, text, ha="center", va="center", fontsize=8, color=INK)
            x += _BOX * wide
        axes.text(_LABEL + _BOX * most + 0.1, y, counted(len(boxes), "gather"), va="center", fontsize=9, color=INK)
        lines.append(f"{name}: {len(boxes)}: " + " | ".join(text for text, _ in boxes))
    y, x = 0.2 - height, _LABEL
    drawn = {(text != "no module", wide > 1) for boxes in rows.values() for text, wide in boxes}
    legend = (("all-gather of one weight", 0.3, (True, False)), ("all-gather of a bucket", 0.9, (True, True)),
              ("no module in its metadata", 0.3, (False, False)))
    for text, length, (known, _) in (each for each in legend if each[2] in drawn):
        _frame(axes, x + 0.03, y, length - 0.06, 0.2, known)
        axes.text(x + length + 0.05, y, text, va="center", fontsize=9, color=INK)
        x += length + 0.4 + 0.075 * len(text)
    return finish(figure, "Boxes in rows: " + "; ".join(lines) + ".", "\n".join(lines))


def _frame(axes: Axes, x: float, y: float, wide: float, high: float, known: bool) -> None:
    """A box, centred on `y`: filled where the module is known, else dashed."""
    axes.add_patch(FancyBboxPatch(
        (x, y - high / 2), wide, high, boxstyle="round,pad=0,rounding_size=0.05", facecolor=FILL if known else PAPER,
        edgecolor=RED if known else GREY, linestyle="-" if known else "--"))


def _gathers(gm: GraphModule) -> list[tuple[Node, frozenset[Node]]]:
    """Each all-gather of the forward, and the parameters in it."""
    flow = Flow(gm)
    return [(n, flow.parameters(n) or frozenset()) for n in parameter_gathers(gm, flow) if not is_backward(n)]


def _box(node: Node, weights: frozenset[Node]) -> tuple[str, int]:
    """The text of a box and its width in weights; a bucket is named by what its readers' paths begin with."""
    if len(weights) < 2:
        return provenance(node).module or "no module", 1
    shared = commonpath([provenance(user).module.replace(".", "/") for weight in weights for user in weight.users])
    return f"{shared.replace('/', '.')}: {len(weights)} weights".removeprefix(": "), len(weights)
