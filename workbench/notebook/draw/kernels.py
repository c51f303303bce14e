"""For passes that return no graph: Inductor's kernels, and the inputs of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import MaxNLocator

from workbench.errors import WorkbenchError
from workbench.graph.callables import kernels_of
from workbench.graph.read.kernels import Kernel, Kernels
from workbench.graph.read.replay import Replay
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, ORANGE, PINK, YELLOW
from workbench.notebook.draw.picture import Picture, Table, finish, panels
from workbench.passes.cudagraph import Replayed
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted

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


def kernels(what: Given) -> Picture:
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


def replay(record: PassRecord) -> Table:
    """The inputs of the CUDA graphs, static or copied, and their memory and launches; addresses are in the HTML only.

    Raises WorkbenchError for the record of another pass.
    """
    found = recorded(record)
    addresses = ["" if x.address is None else f"{x.address:#x}" for f in found for x in f.inputs]
    rows: list[tuple[Any, ...]] = [
        (f.graph, x.name, x.parameter, "static" if x.static else "copied", list(x.shape), x.bytes)
        for f in found for x in f.inputs]
    heads: tuple[str, ...] = ("graph", "input", "parameter", "static or copied", "shape", "bytes")
    known = any(addresses)
    if known:
        heads, rows = (
            (*heads, "address"),
            [(*row, at) for row, at in zip(rows, addresses, strict=True)],
        )
    return Table(
        "inputs of the CUDA graphs",
        heads,
        tuple(rows),
        notes=tuple(f.summary() for f in found),
        hidden=("address",) if known else (),
    )


def recorded(record: PassRecord) -> list[Replay]:
    """The CUDA graphs of a pass's record. Raises WorkbenchError for the record of another pass."""
    made: list[Any] = [body for body in record.after if isinstance(body, Replayed)]
    if not made:
        raise WorkbenchError(
            f"pass {record.name!r} records no CUDA graph: give the record of cudagraph"
        )
    return [body.facts for body in made]
