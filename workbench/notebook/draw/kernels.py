"""For passes that return no graph: Inductor's kernels with their nodes, and the inputs of CUDA graphs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import MaxNLocator

from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.replay import Replay
from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PAPER, PINK, YELLOW
from workbench.notebook.draw.picture import Picture, Table, finish, new_figure, panels, shortened
from workbench.passes.cudagraph.recording import Replayed
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"triton": BLUE, "cpp": GREEN, "extern": ORANGE, "collective": PINK, "wait": GREY, "other": YELLOW}
LABELS = {"triton": "generated (triton)", "cpp": "generated (cpp)", "extern": "library call (extern)"}
MOST = 60
"""The most bars in one picture; later calls are only counted."""

Given = PassRecord | Kernels | Sequence[Kernels]


def _given(what: Given) -> tuple[Kernels, ...]:
    if isinstance(what, Kernels):
        return (what,)
    found = kernels_of(what.before, what.after) if isinstance(what, PassRecord) else tuple(what)
    if not found:
        name = f"pass {what.name!r}" if isinstance(what, PassRecord) else "this"
        raise WorkbenchError(f"{name} has no kernels of Inductor: give the record of full_inductor_compilation, of "
                             "a cudagraph after it, or of regional_inductor")
    return found


def kernels(what: Given) -> Picture:
    """A bar for each call at its number; its height is the number of nodes that it computes. Collectives have full
    height.

    Waits are numbered and counted, but not drawn. Raises WorkbenchError where Inductor compiled nothing.
    """
    given = _given(what)
    figure, shown = panels(9, 0.6 + 2.2 * len(given), len(given))
    lines = [f"kernels of {what.name}"] if isinstance(what, PassRecord) else ["kernels"]
    for axes, found in zip(shown, given, strict=True):
        lines += _bars(axes, found)
    return finish(figure, "Bars of nodes per kernel, in calling order. " + "; ".join(lines) + ".", "\n".join(lines))


def _bars(axes: Axes, found: Kernels) -> list[str]:
    """Draw one graph; returns its lines of text."""
    calls = [k for k in found.kernels if k.launches]
    drawn, folded = calls[:MOST], calls[MOST:]
    top = max((len(k.nodes) for k in drawn if k.kind != "collective"), default=1)
    lines, end = [found.summary()], drawn[-1].number + 1 if drawn else 0
    for kind, color in COLORS.items():
        at = [(k.number, len(k.nodes)) for k in drawn if k.kind == kind]
        if kind == "collective":
            axes.vlines([i for i, _ in at], 0, top, color=color, linewidth=1.4, label=kind if at else "")
        elif at:
            axes.bar([i for i, _ in at], [high for _, high in at], 0.8, color=color, label=LABELS.get(kind, kind))
        if of_kind := [k for k in calls if k.kind == kind]:
            nodes = len({n for k in of_kind for n in k.nodes})
            lines.append(f"  {kind}: {len(of_kind)} calls of {len({k.name for k in of_kind})} kernels, {nodes} nodes")
    if folded:
        count = f"{len(folded)} more calls, {len({n for k in folded for n in k.nodes})} nodes"
        axes.text(end, top / 2, f"+ {count}", rotation=90, fontsize=8, color=INK, ha="center", va="center")
        lines.append(f"  not drawn: {count}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(-0.6, end - 0.4 + bool(folded)), ylim=(0, top * 1.05), ylabel="nodes")
    axes.set_xlabel("number of the call")
    axes.set_title(_title(found, calls), fontsize=10)
    if calls:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return lines


def _title(found: Kernels, calls: Sequence[Kernel]) -> str:
    """The nodes that the calls compute, of all: views, waits and nodes that Inductor took out are in none of them."""
    within = len({*found.nodes}.intersection(n for k in calls for n in k.nodes))
    lost = f", {len(found.not_found)} nodes not found" if found.not_found else ""
    waits = f"; {counted(count, 'wait')} not drawn" if (count := len(found.kernels) - len(calls)) else ""
    return f"{found.graph}: {counted(len(calls), 'call')} with {within} of {len(found.nodes)} nodes{lost}{waits}"


def kernel_table(what: Given, *, kind: str | None = None, nodes: Collection[str] | None = None) -> Table:
    """A row for each call: kernel, kind, its nodes, their modules and source lines. The HTML also has the nodes' names.

    kind: only calls of that kind, and no column for it; nodes: only calls with any of these. A column names the graph
    where there are several. Raises WorkbenchError where Inductor compiled nothing.
    """
    given = _given(what)
    picked = [(f, k) for f in given for k in f.kernels
              if kind in (None, k.kind) and (nodes is None or not {*k.nodes}.isdisjoint(nodes))]
    rows = tuple((f.graph, k.number, _short(k.name), k.kind, len(k.nodes), few(k.modules, 2), few(k.places, 2),
                  ", ".join(k.nodes)) for f, k in picked)
    heads = ("graph", "call", "kernel", "kind", "nodes", "modules", "source lines", "names")
    kept = [i for i, head in enumerate(heads) if (head, len(given)) != ("graph", 1) and (head != "kind" or not kind)]
    return Table("kernels in calling order", tuple(heads[i] for i in kept),
                 tuple(tuple(row[i] for i in kept) for row in rows),
                 notes=tuple(f.summary() for f in given), hidden=("names",))


def _short(name: str) -> str:
    """The beginning, and the number at the end, which tells generated kernels apart."""
    return shortened(name.removeprefix("torch.ops."), 56, head=42)


def replay(record: PassRecord) -> Table:
    """The inputs of the CUDA graphs, static or copied, and their memory and launches; addresses are in the HTML only.

    Raises WorkbenchError for the record of another pass.
    """
    found = _recorded(record)
    addresses = ["" if x.address is None else f"{x.address:#x}" for f in found for x in f.inputs]
    rows: list[tuple[Any, ...]] = [
        (f.graph, x.name, x.parameter, "static" if x.static else "copied", list(x.shape), x.bytes)
        for f in found for x in f.inputs]
    heads: tuple[str, ...] = ("graph", "input", "parameter", "static or copied", "shape", "bytes")
    known = any(addresses)
    if known:
        heads, rows = (*heads, "address"), [(*row, at) for row, at in zip(rows, addresses, strict=True)]
    return Table("inputs of the CUDA graphs", heads, tuple(rows), notes=tuple(f.summary() for f in found),
                 hidden=("address",) if known else ())


def addresses(record: PassRecord) -> Picture:
    """From where each CUDA graph reads its inputs: at their own address, or in a copy that belongs to the recording.

    An input that lies in the memory of an earlier graph names it: that graph's copy, or its result.

    Raises WorkbenchError for the record of another pass, and where there are more than MOST inputs.
    """
    found = _recorded(record)
    if (count := sum(len(f.inputs) for f in found)) > MOST:
        raise WorkbenchError(f"{count:,} inputs are too many for a picture: draw.replay lists them")
    high = sum(len(f.inputs) + 0.7 for f in found)
    figure = new_figure(9.6, 0.5 + 0.34 * high)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 10), ylim=(high - 0.35, -0.6))
    axes.axis("off")
    top, lines = 0.0, ["addresses of the CUDA graphs"]
    for i, f in enumerate(found):
        origins = _origins(f, found[:i])
        rows = max(len(f.inputs), 1)
        _box(axes, 7.2, top + (rows - 1) / 2, 1.5, rows - 0.25, f"{f.graph}:\nCUDA graph", FAINT)
        _box(axes, 9.3, top + (rows - 1) / 2, 1.2, rows - 0.25, "results", YELLOW)
        _arrow(axes, 7.95, 8.7, top + (rows - 1) / 2)
        for y, x in enumerate(f.inputs):
            text = shortened(x.parameter or x.name, 30) + origins.get(x.name, "")
            _box(axes, 1.4, top + y, 2.6, 0.72, text, YELLOW if x.static else PAPER)
            if x.static:
                _arrow(axes, 2.7, 6.45, top + y)
            else:
                _box(axes, 4.6, top + y, 1.7, 0.72, "copy", YELLOW)
                _arrow(axes, 2.7, 3.75, top + y)
                _arrow(axes, 5.45, 6.45, top + y)
        lines.append(f"{f.graph}: reads {few([x.parameter or x.name for x in f.static], 6) or 'no input'} in place; "
                     f"copies {few([x.name for x in f.copied], 6) or 'no input'}")
        top += rows + 0.7
    figure.legend(handles=[Patch(facecolor=YELLOW, edgecolor=GREY, label="at the same address in each replay"),
                           Patch(facecolor=PAPER, edgecolor=GREY, label="elsewhere in each step")],
                  loc="outside upper right", ncols=2, fontsize=8, frameon=False)
    return finish(figure, "Inputs on the left, CUDA graphs on the right. " + "; ".join(lines[1:]) + ".",
                  "\n".join(lines))


def _origins(graph: Replay, earlier: Sequence[Replay]) -> dict[str, str]:
    """By static inputs in the memory of an earlier graph: what they are there, as the picture says it."""
    copies = {x.name: f.graph for f in earlier for x in f.copied}
    others = {x.name for f in earlier for x in f.static}  # buffers, which their module holds
    return {x.name: f", {copies[x.name]}'s copy" if x.name in copies else f", {earlier[-1].graph}'s result"
            for x in graph.static if earlier and not x.parameter and x.name not in others}


def _recorded(record: PassRecord) -> list[Replay]:
    made: list[Any] = [body for body in record.after if isinstance(body, Replayed)]
    if not made:
        raise WorkbenchError(f"pass {record.name!r} records no CUDA graph: give the record of cudagraph")
    return [body.facts for body in made]


def _box(axes: Axes, x: float, y: float, wide: float, high: float, text: str, fill: str) -> None:
    axes.add_patch(FancyBboxPatch((x - wide / 2, y - high / 2), wide, high, boxstyle="round,pad=0,rounding_size=0.08",
                                  facecolor=fill, edgecolor=GREY, linewidth=0.8))
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK)


def _arrow(axes: Axes, start: float, end: float, y: float) -> None:
    axes.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 0, "shrinkB": 0})
