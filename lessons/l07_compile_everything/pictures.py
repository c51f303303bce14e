"""Pictures and tables of kernels with their nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, ORANGE, PINK, YELLOW
from workbench.notebook.draw.picture import Picture, Table, finish, panels, shortened
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted, few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"triton": BLUE, "cpp": GREEN, "extern": ORANGE, "collective": PINK, "wait": GREY, "other": YELLOW}
LABELS = {
    "triton": "generated (triton)",
    "cpp": "generated (cpp)",
    "extern": "library call (extern)",
}
MOST = 60
"""The most bars in one picture; later calls are only counted."""

Given = PassRecord | Kernels | Sequence[Kernels]


def given_kernels(what: Given) -> tuple[Kernels, ...]:
    """The kernels of each graph. Raises WorkbenchError where Inductor compiled nothing."""
    if isinstance(what, Kernels):
        return (what,)
    found = kernels_of(what.before, what.after) if isinstance(what, PassRecord) else tuple(what)
    if not found:
        name = f"pass {what.name!r}" if isinstance(what, PassRecord) else "this"
        raise WorkbenchError(
            f"{name} has no kernels of Inductor: give the record of full_inductor_compilation, of "
            "a cudagraph after it, or of regional_inductor"
        )
    return found


def draw_kernels(what: Given) -> Picture:
    """A bar for each call at its number; its height is the number of nodes that it computes. Collectives have full
    height.

    Waits are numbered and counted, but not drawn. Raises WorkbenchError where Inductor compiled nothing.
    """
    given = given_kernels(what)
    figure, shown = panels(9, 0.6 + 2.2 * len(given), len(given))
    lines = [f"kernels of {what.name}"] if isinstance(what, PassRecord) else ["kernels"]
    for axes, found in zip(shown, given, strict=True):
        lines += _bars(axes, found)
    return finish(
        figure,
        "Bars of nodes per kernel, in calling order. " + "; ".join(lines) + ".",
        "\n".join(lines),
    )


def _bars(axes: Axes, found: Kernels) -> list[str]:
    """Draw one graph; returns its lines of text."""
    calls = [k for k in found.kernels if k.launches]
    drawn, folded = calls[:MOST], calls[MOST:]
    top = max((len(k.nodes) for k in drawn if k.kind != "collective"), default=1)
    lines, end = [found.summary()], drawn[-1].number + 1 if drawn else 0
    for kind, color in COLORS.items():
        at = [(k.number, len(k.nodes)) for k in drawn if k.kind == kind]
        if kind == "collective":
            axes.vlines(
                [i for i, _ in at], 0, top, color=color, linewidth=1.4, label=kind if at else ""
            )
        elif at:
            axes.bar([i for i, _ in at], [high for _, high in at], 0.8, color=color, label=LABELS.get(kind, kind))
        if of_kind := [k for k in calls if k.kind == kind]:
            nodes = len({n for k in of_kind for n in k.nodes})
            lines.append(
                f"  {kind}: {len(of_kind)} calls of {len({k.name for k in of_kind})} kernels, {nodes} nodes"
            )
    if folded:
        count = f"{len(folded)} more calls, {len({n for k in folded for n in k.nodes})} nodes"
        axes.text(
            end, top / 2, f"+ {count}", rotation=90, fontsize=8, color=INK, ha="center", va="center"
        )
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
    waits = (
        f"; {counted(count, 'wait')} not drawn"
        if (count := len(found.kernels) - len(calls))
        else ""
    )
    return f"{found.graph}: {counted(len(calls), 'call')} with {within} of {len(found.nodes)} nodes{lost}{waits}"


def kernel_table(what: Given, *, kind: str | None = None, nodes: Collection[str] | None = None) -> Table:
    """A row for each call: kernel, kind, its nodes, their modules and source lines. The HTML also has the nodes' names.

    kind: only calls of that kind, and no column for it; nodes: only calls with any of these. A column names the graph
    where there are several. Raises WorkbenchError where Inductor compiled nothing.
    """
    given = given_kernels(what)
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
