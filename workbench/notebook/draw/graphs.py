"""An overview of a graph, rows of letters for small ones, collectives around a pass, and what the forward saves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward
from workbench.graph.read import collectives
from workbench.graph.read.memory import SavedTensor, saved_tensors
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, GREY, INK, NAMES, ORANGE, PAPER, PINK, RED, SKY
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import aligned
from workbench.torch_api.aot import is_tangent

LANES = {"collective": RED, "matmul": BLUE, "attention": PINK, "pointwise": GREEN, "reduction": ORANGE, "view": GREY,
         "copy": SKY}


def by_title(what: GraphModule | ForwardBackward | PassRecord, title: str) -> dict[str, Mapping[str, GraphModule]]:
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
    later = [part == "backward" if whole else n.meta.get("partitioner_tag") == "is_backward" for n in calls]
    figure, (axes,) = panels(9, 2.9)
    counts: dict[str, list[int]] = {}
    for lane, (kind, color) in enumerate(LANES.items()):
        at = [i for i, n in enumerate(calls) if kind_of(n) == kind]
        axes.vlines(at, lane - 0.4, lane + 0.4, color=color, linewidth=1.1)
        counts[kind] = [sum(not later[i] for i in at), sum(later[i] for i in at)]
    axes.set_yticks(range(len(LANES)), list(LANES))
    axes.set(xlim=(-1, len(calls)), ylim=(len(LANES) - 0.4, -0.6), xlabel="operators, in their order")
    if any(later) and not all(later):
        start = later.index(True)
        axes.axvspan(start - 0.5, len(calls), color="#e9ecef", zorder=0)
        for x, word in ((0, "forward"), (start, "backward")):
            axes.text(x + 1, -0.62, word, fontsize=9, va="bottom", style="italic")
    axes.set_title(f"{title}: {len(calls)} operators", fontsize=10, pad=16)
    lines = [f"{title}: {len(calls)} operators"]
    if not whole:
        lines[0] += f", {len(later) - sum(later)} forward and {sum(later)} backward"
    lines += [f"{kind}: {fw + bw if whole else f'{fw} forward, {bw} backward'}" for kind, (fw, bw) in counts.items()]
    return finish(figure, "Operators of a graph in lanes by kind. " + "; ".join(lines) + ".", "\n".join(lines))


def order(rows: Mapping[str, str], kinds: Mapping[str, str]) -> Picture:
    """A row for each graph, a box for each operator, from the first to the last.

    rows: title -> a letter for each operator. kinds: letter -> what it stands for, at most three; any other letter is
    an empty box. "|" is no operator: it is a dashed line, and kinds["|"] is what begins there. Text: the letters, one
    below the other. Raises WorkbenchError without any row, or for more kinds.
    """
    signs = [letter for letter in kinds if letter != "|"]
    if not rows or len(signs) > 3:
        raise WorkbenchError("draw.order: give one row or more, by title, and at most 3 kinds")
    colors = dict(zip(signs, NAMES, strict=False))
    dashed: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.1}
    figure, (axes,) = panels(9.6, 0.5 + 0.42 * len(rows))
    for y, letters in enumerate(rows.values()):
        if "|" in letters:
            axes.vlines(letters.index("|"), y - 0.47, y + 0.47, **dashed)
        for x, letter in enumerate(letters.replace("|", "")):
            axes.add_patch(Rectangle((x + 0.06, y - 0.36), 0.88, 0.72, facecolor=colors.get(letter, FAINT)))
            if letter in colors:
                axes.text(x + 0.5, y, letter, ha="center", va="center", fontsize=8.5,
                          color=PAPER if colors[letter] == GREEN else INK)
    most = max(len(letters.replace("|", "")) for letters in rows.values())
    axes.set(xlim=(0, most), ylim=(len(rows) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles: list[Artist] = [Patch(facecolor=color, label=f"{letter}: {kinds[letter]}")
                             for letter, color in colors.items()]
    if set().union(*rows.values()) - {*kinds}:
        handles.append(Patch(facecolor=FAINT, label="other operators"))
    if "|" in kinds:
        handles.append(Line2D([], [], **dashed, label=kinds["|"]))
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1))
    alt = "Operators in their order. " + "; ".join(f"{title}: {letters}" for title, letters in rows.items()) + "."
    return finish(figure, alt, "\n".join(aligned([*rows.items()])), colors=64)


def launches(record: PassRecord) -> Picture:
    """The number of collectives before and after a pass, by kind and mesh axis."""
    before, after = (collectives.launches(c for gm in graphs for c in collectives.list_collectives(gm))
                     for graphs in (record.before, record.after))
    keys = sorted(before.keys() | after.keys())
    figure, (axes,) = panels(8, 0.9 + 0.45 * len(keys))
    for shift, counts, color, word in ((-0.2, before, GREY, "before"), (0.2, after, PINK, "after")):
        values = [counts.get(key, 0) for key in keys]
        bars = axes.barh([i + shift for i in range(len(keys))], values, 0.38, color=color, label=word)
        axes.bar_label(bars, padding=3, fontsize=8)
    axes.set_yticks(range(len(keys)), [f"{kind.replace('_', '-')} over {axis}" for kind, axis in keys])
    axes.invert_yaxis()
    axes.set_xlabel("launches")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title(record.name, fontsize=10)
    lines = [f"launches before and after {record.name}"]
    lines += [f"{kind.replace('_', '-')} over {axis}: {before.get((kind, axis), 0)} to {after.get((kind, axis), 0)}"
              for kind, axis in keys]
    return finish(figure, "Bars: " + "; ".join(lines) + ".", "\n".join(lines))


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
        own = row.name if gathered else _NUMBER.sub("", row.name)
        alike.setdefault((own, row.shape, row.dtype, row.held_bytes, row.policy, row.source, bool(row.gathered),
                          _LAYER.sub("*", row.module)), []).append(row)
    shown = []
    for rows in sorted(alike.values(), key=lambda rows: (-sum(r.held_bytes for r in rows), rows[0].name)):
        r = rows[0]
        name = r.name if len(rows) == 1 else f"{r.name} x {len(rows)}"
        facts = (name, list(r.shape), r.dtype, sum(x.held_bytes for x in rows), _modules(rows))
        kind = "a gathered parameter" if r.gathered else "an activation"
        shown.append((*facts, *((" > ".join(r.alias),) if gathered else (kind, r.policy, r.source))))
    last = ("chain to the storage's owner",) if gathered else ("what it is", "policy", "source line")
    heads = ("tensor", "shape", "dtype", "bytes held", "module", *last)
    return table("saved between forward and backward", heads, shown, *notes)


_NUMBER = re.compile(r"_\d+$")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _modules(rows: list[SavedTensor]) -> str:
    """The module path; for identical layers with the smallest and the largest number: `layers.0-3.attention`."""
    columns = zip(*(map(int, _LAYER.findall(row.module)) for row in rows), strict=True)
    ranges = iter([f"{min(c)}-{max(c)}" if min(c) < max(c) else str(c[0]) for c in columns])
    return _LAYER.sub(lambda _: next(ranges), rows[0].module) or "the model itself"
