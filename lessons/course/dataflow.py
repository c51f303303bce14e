"""A small graph as boxes and arrows: the forward above, the backward below, and what the backward reads from above."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.patheffects import withStroke
from torch import Tensor
from torch.fx import GraphModule, Node

from workbench.errors import WorkbenchError
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, NAMES, PAPER, RED
from workbench.notebook.draw.graphs import LANES
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.torch_api.aot import is_tangent

MOST = 40  # boxes
DARK = (BLUE, GREEN, RED, INK)  # with light text
HIGH = 0.25  # half of a box
PALE = "#dddddd"  # operators without a name
VIEW = "#c8c8c8"  # lighter than the grey of lanes: a name is written on it


def dataflow(gm: GraphModule, title: str = "dataflow", *, views: bool = True,
             name_of: Callable[[Node], str] | None = None, rest: str = "no name", narrow: bool = False,
             palette: Mapping[str, str] | None = None,
             rows: tuple[str, str] = ("forward", "backward"), only: Iterable[Node] | None = None) -> Picture:
    """A box for each tensor of a joint graph, and an arrow to each operator that reads it.

    views: False draws one box for each storage: a view's readers read the tensor that owns its memory. name_of: colours
    operators by this name instead of by kind, and leaves those grey for which it is empty; rest: the legend's name for
    these. palette: the colour of each name, in place of NAMES. narrow: higher boxes with shorter lines, so
    that a long row fits on a page. A graph without a backward has one row. rows: what the upper and the lower row are
    called. only: boxes for these nodes alone, and arrows that skip what lies between. Text: the operators, each arrow
    from the upper row to the lower, and the operators of each name. WorkbenchError above 40 boxes.
    """
    owner = {n: n for n in gm.graph.nodes} if views else roots(gm)
    at, arrows = places(gm, owner, only)
    width = 1 + int(max(x for x, _ in at.values()))
    operators = [n for n in at if n.op != "placeholder"]
    label = {n: kind_of(n) if name_of is None else name_of(n) for n in operators}
    # those without are last
    labels = sorted(dict.fromkeys(label.values()), key=lambda name: not name)
    if palette is None:
        palette = (LANES | {"view": VIEW} if name_of is None
                   else dict(zip(filter(None, labels), NAMES * len(labels), strict=False)))
    other = PALE if name_of else GREY
    one_row = all(y for _, y in at.values())
    above, below = (
        max((abs(at[a][0] - at[b][0]) for a, b in arrows if at[a][1] == at[b][1] == y), default=0)
        for y in (1.0, 0.0)
    )
    top = 1.95 if above > 1 else 1.6
    low = 0.6 if one_row else -0.95 - 0.07 * max(0, below - 5) if below > 1 else -0.55
    wide = max(8.0, (0.8 if narrow else 1.12) * width)
    figure = new_figure(wide, 0.9 + (1.14 if narrow else 0.86) * (top - low))
    axes = figure.subplots()
    axes.set(xlim=(-0.55, width - 0.45), ylim=(low, top))
    axes.axis("off")
    size = 7 if narrow else 8
    skipping = [] if only is None else [(a, b) for a, b in arrows if a not in b.all_input_nodes]
    half = 0.36 if skipping else 0.43  # of a box's width; a dotted arrow needs a longer gap
    room = 240 * half * wide / width  # letters in a box, times their size
    results = {owner[n] for n in gm.graph.output_node().all_input_nodes}
    for node, (x, y) in at.items():
        fill = palette.get(label[node], other) if node in label else PAPER
        axes.add_patch(FancyBboxPatch(
            (x - half, y - HIGH), 2 * half, 2 * HIGH, boxstyle="round,pad=0,rounding_size=0.06", zorder=3,
            facecolor=fill, edgecolor=INK, linewidth=2.2 if node in results else 0.6))
        words = _label(node, int(room / size))
        longest = max(map(len, words.split("\n")))
        axes.text(x, y, words, ha="center", va="center", fontsize=min(size, 0.96 * room / (1 + longest)), zorder=4,
                  color=PAPER if fill in DARK else INK)
    across = {(a, b): (at[a], at[b]) for a, b in arrows if at[a][1] > at[b][1]}
    for start, end in arrows:
        axes.add_patch(_arrow(at[start], at[end], _apart(start, end, across), half,
                              ":" if (start, end) in skipping else "-"))
    upper, lower = rows
    axes.text(-0.5, top - 0.05, f"{upper}, to the right", fontsize=9, style="italic", va="top")
    if not one_row:
        axes.text(width - 0.5, low, f"{lower}, to the left", fontsize=9, style="italic", ha="right", va="bottom")
    handles: list[Artist] = [
        Patch(facecolor=palette.get(name, other), label=name or rest) for name in labels
    ]
    if len(operators) < len(at):
        handles.append(Patch(facecolor=PAPER, edgecolor=INK, label="input"))
    if any(n in results for n in at):
        handles.append(Patch(facecolor=PAPER, edgecolor=INK, linewidth=2.2, label="result"))
    handles.append(Line2D([], [], color=GREY, linewidth=1, label="read in its row"))
    if not one_row:
        handles.append(Line2D([], [], color=INK, linewidth=2, label=f"read by the {lower}"))
    if skipping:
        handles.append(
            Line2D([], [], color=GREY, linewidth=1, linestyle=":", label="over operators left out")
        )
    legend = _legend(figure, handles, min(len(handles), int(wide / 1.2)))
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        _legend(figure, handles, (len(handles) + 1) // 2)
    axes.set_title(title, fontsize=10)
    text = [f"{title}: {len(operators)} operators, {len(across)} arrows from {upper} to {lower}",
            *(f"{a.name} > {b.name}" for a, b in across)]
    if name_of is not None:
        text += [
            f"{name or rest}: " + " ".join(n.name for n in operators if label[n] == name)
            for name in labels
        ]
    return finish(figure, f"Boxes and arrows: {text[0]}.", "\n".join(text), colors=64)


def _legend(figure: Figure, handles: list[Artist], columns: int) -> Legend:
    return figure.legend(
        handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
    )


Place = tuple[float, float]


def places(gm: GraphModule, owner: Mapping[Node, Node], only: Iterable[Node] | None = None
           ) -> tuple[dict[Node, Place], list[tuple[Node, Node]]]:
    """The place of each box, the forward from left to right above the backward, and the arrows between them.

    owner: the node whose box stands for each node. only: nodes with a box, by default all. WorkbenchError above 40
    boxes.
    """
    drawn = set(owner) if only is None else set(only)
    boxes = [n for n in gm.graph.nodes
             if n.op != "output" and owner[n] is n and n in drawn and isinstance(n.meta.get("val"), Tensor)]
    if len(boxes) > MOST:
        raise WorkbenchError(
            f"draw.dataflow draws at most {MOST} boxes, and this graph has {len(boxes)}: "
            "use draw.graph or show"
        )
    read = ((owner[a], owner[b]) for b in gm.graph.nodes for a in b.all_input_nodes)
    arrows = [(a, b) for a, b in dict.fromkeys(read if only is None else _skipping(gm, drawn))
              if a is not b and a in boxes and b in boxes]
    below = _row([n for n in boxes if _later(n)], arrows)
    above = _row([n for n in boxes if not _later(n)], arrows, below)
    width = max(len(above), len(below))
    at = {n: (float(i), 1.0) for i, n in enumerate(above)} | {
        n: (float(width - 1 - i), 0.0) for i, n in enumerate(below)}
    return {n: at[n] for n in boxes}, arrows


def _skipping(gm: GraphModule, drawn: set[Node]) -> Iterator[tuple[Node, Node]]:
    """Pairs of drawn nodes with a path between them that meets no other drawn node."""
    last: dict[Node, dict[Node, None]] = {}  # by node: the drawn ones that its paths met last
    for node in gm.graph.nodes:
        met = {source: None for operand in node.all_input_nodes for source in last[operand]}
        if node in drawn:
            yield from ((source, node) for source in met)
        last[node] = {node: None} if node in drawn else met


def _later(node: Node) -> bool:
    return (
        is_tangent(node)
        if node.op == "placeholder"
        else node.meta.get("partitioner_tag") == "is_backward"
    )


def _row(
    nodes: list[Node], arrows: Iterable[tuple[Node, Node]], below: Sequence[Node] = ()
) -> list[Node]:
    """In graph order, with each input just before its first reader, and first the gradients that come in.

    Inputs that it does not read are at its ends, above their readers: `below` goes to the left.
    """
    placed = dict.fromkeys(n for n in nodes if n.op == "placeholder" and is_tangent(n))
    for node in (n for n in nodes if n.op != "placeholder"):
        placed |= dict.fromkeys(
            a for a, b in arrows if b is node and a.op == "placeholder" and a in nodes
        )
        placed[node] = None
    reader = {a: below.index(b) for a, b in arrows if b in below}
    ends = sorted((n for n in nodes if n not in placed), key=lambda n: -reader.get(n, -1))
    late = [n for n in ends if reader.get(n, 0) > len(below) / 2]
    return [*late, *placed, *ends[len(late):]]


def _label(node: Node, longest: int) -> str:
    """The name in lines of at most so many characters, where its words allow it, and the shape."""
    words, lines = node.name.split("_"), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > longest:
            lines.append("")
        lines[-1] += ("_" if word is not words[0] else "") + word
    return "\n".join([*lines, str(list(node.meta["val"].shape))])


def _apart(
    start: Node, end: Node, across: Mapping[tuple[Node, Node], tuple[Place, Place]]
) -> tuple[float, float]:
    """How far from the middles of its boxes an arrow down begins and ends: those of one box stay apart, in order."""
    if (start, end) not in across:
        return 0.0, 0.0
    begin, stop = across[start, end]
    leave = sorted(to for (a, _), (_, to) in across.items() if a is start)
    come = sorted(since for (_, b), (since, _) in across.items() if b is end)
    return 0.2 * (leave.index(stop) - (len(leave) - 1) / 2), 0.2 * (
        come.index(begin) - (len(come) - 1) / 2
    )


def _arrow(
    start: Place, end: Place, aside: tuple[float, float], half: float, line: str
) -> FancyArrowPatch:
    """Down from the forward to the backward, with a white rim where it crosses another; along a row straight to the
    neighbour, and in an arc over others.
    """
    (x, y), (to, below) = start, end
    if y > below:
        return FancyArrowPatch((x + aside[0], y - HIGH - 0.01), (to + aside[1], below + HIGH + 0.02), linewidth=2,
                               arrowstyle="-|>", mutation_scale=11, color=INK, zorder=2, linestyle=line,
                               path_effects=[withStroke(linewidth=5, foreground=PAPER)])
    side = 1 if y else -1
    if abs(to - x) == 1:
        ends, style = ((x + half * (to - x), y), (to - (half + 0.01) * (to - x), y)), "arc3"
    else:
        ends = (x, y + (HIGH + 0.01) * side), (to, y + (HIGH + 0.02) * side)
        style = f"arc3,rad={-0.9 / abs(to - x) - 0.05}"
    return FancyArrowPatch(*ends, connectionstyle=style, arrowstyle="-|>", mutation_scale=9, linewidth=1, color=GREY,
                           zorder=2, linestyle=line)
