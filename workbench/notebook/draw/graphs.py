"""An overview of a graph."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.pipeline.run_passes import PassRecord

LANES = {"collective": RED, "matmul": BLUE, "attention": PINK, "pointwise": GREEN, "reduction": ORANGE, "view": GREY,
         "copy": SKY}


def by_title(
    what: GraphModule | ForwardBackward | PassRecord, title: str
) -> dict[str, Mapping[str, GraphModule]]:
    """The graphs to draw, by title and part: of a pass's record those before and those after it, as far as they are
    graphs. `title` is for a single graph.
    """
    if isinstance(what, PassRecord):
        return {f"{when} {what.name}": dict(zip(what.parts, graphs, strict=True))
                for when, graphs in (("before", what.before), ("after", what.after))
                if all(isinstance(gm, GraphModule) for gm in graphs)}
    if isinstance(what, ForwardBackward):
        return {"forward and backward": what.by_part}
    return {title: {facts_of(what).part: what}}


def graph(gm: GraphModule, title: str = "") -> Picture:
    """Every node in graph order, with a lane for each kind; a joint graph's backward part is shaded.

    Text: nodes of each kind in the forward and in the backward part.
    """
    part = facts_of(gm).part
    title = title or ("graph" if part == "graph" else f"{part} graph")
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    whole = part in ("forward", "backward")
    later = [
        part == "backward" if whole else n.meta.get("partitioner_tag") == "is_backward"
        for n in calls
    ]
    figure, (axes,) = panels(9, 2.9)
    counts: dict[str, list[int]] = {}
    for lane, (kind, color) in enumerate(LANES.items()):
        at = [i for i, n in enumerate(calls) if kind_of(n) == kind]
        axes.vlines(at, lane - 0.4, lane + 0.4, color=color, linewidth=1.1)
        counts[kind] = [sum(not later[i] for i in at), sum(later[i] for i in at)]
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set(
        xlim=(-1, len(calls)), ylim=(len(LANES) - 0.4, -0.6), xlabel="operators, in their order"
    )
    if any(later) and not all(later):
        start = later.index(True)
        axes.axvspan(start - 0.5, len(calls), color="#e9ecef", zorder=0)
        for x, word in ((0, "forward"), (start, "backward")):
            axes.text(x + 1, -0.62, word, fontsize=9, va="bottom", style="italic")
    axes.set_title(f"{title}: {len(calls)} operators", fontsize=10, pad=16)
    lines = [f"{title}: {len(calls)} operators"]
    if not whole:
        lines[0] += f", {len(later) - sum(later)} forward and {sum(later)} backward"
    lines += [
        f"{kind}: {fw + bw if whole else f'{fw} forward, {bw} backward'}"
        for kind, (fw, bw) in counts.items()
    ]
    return finish(
        figure, "Operators of a graph in lanes by kind. " + "; ".join(lines) + ".", "\n".join(lines)
    )
