"""An overview of a graph, and what the forward saves."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch.fx import GraphModule

from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.memory import SavedTensor, saved_tensors
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.pipeline.run_passes import PassRecord
from workbench.torch_api.aot import is_tangent

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


def saved(pair: ForwardBackward, *, gathered: bool = False, least: int = 1) -> Table:
    """The tensors saved for the backward, largest first: each storage counts once, inputs do not count.

    The same tensor of identical layers is one row, with the bytes of all of them. gathered: only tensors that keep a
    gathered parameter alive, with the chain of views to it. least: leave out tensors that hold fewer bytes; the line
    below counts all.
    """
    rows = saved_tensors(pair.forward, pair.backward)
    picked = [r for r in rows if (r.gathered is not None and not r.copied if gathered else True)
              and r.held_bytes >= least]
    taken = sum(not is_tangent(n) for n in pair.backward.graph.find_nodes(op="placeholder"))
    total, mine = sum(r.held_bytes for r in rows), sum(r.held_bytes for r in picked)
    notes = (f"{len(picked)} of {len(rows)} saved tensors, {mine:,} of {total:,} bytes; "
             f"the backward takes {taken} values from the forward",)
    alike: dict[tuple[object, ...], list[SavedTensor]] = {}
    for row in picked:
        stem = row.name if gathered else _NUMBER.sub("", row.name)
        alike.setdefault((stem, row.shape, row.dtype, row.held_bytes, row.policy, row.source, bool(row.gathered),
                          _LAYER.sub("*", row.module)), []).append(row)
    shown = []
    for rows in sorted(
        alike.values(), key=lambda rows: (-sum(r.held_bytes for r in rows), rows[0].name)
    ):
        r = rows[0]
        name = r.name if len(rows) == 1 else f"{r.name} x {len(rows)}"
        facts = (name, list(r.shape), r.dtype, sum(x.held_bytes for x in rows), _modules(rows))
        kind = "a gathered parameter" if r.gathered else "an activation"
        shown.append(
            (*facts, *((" > ".join(r.alias),) if gathered else (kind, r.policy, r.source)))
        )
    last = (
        ("chain to the storage's owner",) if gathered else ("what it is", "policy", "source line")
    )
    heads = ("tensor", "shape", "dtype", "bytes held", "module", *last)
    return table("saved between forward and backward", heads, shown, *notes)


_NUMBER = re.compile(r"_\d+$")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _modules(rows: list[SavedTensor]) -> str:
    """The module path; for identical layers with the smallest and the largest number: `layers.0-3.attention`."""
    columns = zip(*(map(int, _LAYER.findall(row.module)) for row in rows), strict=True)
    ranges = iter([f"{min(c)}-{max(c)}" if min(c) < max(c) else str(c[0]) for c in columns])
    return _LAYER.sub(lambda _: next(ranges), rows[0].module) or "the model itself"
