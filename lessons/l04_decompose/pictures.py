"""What a few operators read and write as kernels of one or another size, and how their values are rounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch.fx import GraphModule

from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.read.fused_cost import KernelTraffic, traffic_of
from workbench.graph.read.nodes import kind_of
from workbench.notebook.draw.colors import BLUE, FAINT, GREY, INK, ORANGE, PAPER
from workbench.notebook.draw.graphs import LANES
from workbench.notebook.draw.picture import Picture, Table, finish, new_figure, panels, shortened, table
from workbench.passes.inductor_decomposition import Decomposer
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.wording import counted

MOST = 16  # operators in a row
Way = tuple[GraphModule, Sequence[Iterable[str]]]


def replaced_table(joint: JointGraph, record: PassRecord, decompositions: dict[Any, Any]) -> Table:
    """The operators that the pass replaced by several: how many small ones, and which. record: the decomposition's."""
    effect = record.verdict("effect")
    assert effect is not None
    times = effect.evidence["replaced"]
    decomposer = Decomposer(joint.graph, decompositions)
    decomposer.run()
    rows = []
    for (op, *_), body in decomposer.bodies.items():
        small = [n.name for n in body.graph.nodes if n.op == "call_function"] if body else []
        if len(small) > 1:
            names = " ".join(small[:6]) + (" ..." if len(small) > 6 else "")
            rows.append((str(op).removesuffix(".default"), times[str(op)], len(small), names))
    rows = sorted(dict.fromkeys(rows), key=lambda row: -row[2])
    return table("operators that the pass replaced by several", ("operator", "times", "small ones", "namely"), rows)


def kernel_traffic(gm: GraphModule, kernels: Iterable[Iterable[str]]) -> list[KernelTraffic]:
    """The traffic of each kernel, given as the names of its nodes. WorkbenchError for a name that the graph lacks."""
    nodes = {node.name: node for node in gm.graph.nodes}
    try:
        return [traffic_of([nodes[name] for name in names]) for names in kernels]
    except KeyError as error:
        raise WorkbenchError(f"the graph has no node {error}") from None


def traffic(ways: Mapping[str, Way], title: str = "traffic") -> Picture:
    """A row for each way to run some operators: kernels above the memory, an arrow for each tensor read or written.

    ways: title -> (graph, kernels), a kernel being the names of its nodes. Operators of one kernel share a frame;
    values between them are never in memory. Text: each kernel's bytes. WorkbenchError above 16 operators in a row.
    """
    rows = {name: kernel_traffic(gm, kernels) for name, (gm, kernels) in ways.items()}
    wide = max(sum(len(k.nodes) for k in found) + 0.3 * (len(found) - 1) for found in rows.values())
    if max(sum(len(k.nodes) for k in found) for found in rows.values()) > MOST:
        raise WorkbenchError(f"traffic draws at most {MOST} operators in a row: give fewer kernels")
    figure = new_figure(max(9.0, 1.05 * (wide + 0.9) + 0.6), 1.75 * len(rows) + 0.5)
    lines = [title]
    for axes, (name, found) in zip(figure.subplots(len(rows), 1, squeeze=False).flat, rows.items(), strict=True):
        read, wrote = (sum(sum(side.values()) for side in sides)
                       for sides in ([k.reads for k in found], [k.writes for k in found]))
        lines.append(f"{name}: {counted(len(found), 'kernel')}, reads {read:,} + writes {wrote:,} = {read + wrote:,} B")
        axes.set(xlim=(-0.85, wide + 0.1), ylim=(-0.42, 1.3))
        axes.axis("off")
        axes.set_title(lines[-1], fontsize=9.5, loc="left", color=INK)
        axes.add_patch(Rectangle((-0.85, -0.42), wide + 0.95, 0.34, facecolor="#e3e6e9", edgecolor="none"))
        axes.text(-0.8, -0.25, "memory", fontsize=8, style="italic", color=INK, va="center")
        at = 0.0
        for kernel in found:
            _kernel(axes, kernel, at)
            at += len(kernel.nodes) + 0.3
            lines.append(f"  {'+'.join(n.name for n in kernel.nodes)}: reads {_listed(kernel.reads)}; "
                         f"writes {_listed(kernel.writes)}")
    kinds = dict.fromkeys(kind_of(n) for found in rows.values() for k in found for n in k.nodes)
    handles = [Patch(facecolor=LANES.get(kind, GREY), label=kind) for kind in kinds]
    handles += [Patch(facecolor=FAINT, edgecolor=INK, label="frame: one kernel"), Patch(facecolor=BLUE, label="read"),
                Patch(facecolor=ORANGE, label="write")]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10, color=INK)
    return finish(figure, "Kernels above the memory. " + "; ".join(lines) + ".", "\n".join(lines), colors=64)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "nothing"


def _kernel(axes: Axes, kernel: KernelTraffic, left: float) -> None:
    wide = len(kernel.nodes)
    axes.add_patch(Rectangle((left, 0.62), wide, 0.62, facecolor=FAINT, edgecolor=INK, linewidth=1.2))
    for i, node in enumerate(kernel.nodes):
        axes.add_patch(Rectangle((left + i + 0.06, 0.72), 0.88, 0.42, facecolor=LANES.get(kind_of(node), GREY)))
        axes.text(left + i + 0.5, 0.93, shortened(node.name, 13), ha="center", va="center", fontsize=8, color=PAPER)
        if i:
            axes.add_patch(FancyArrowPatch((left + i - 0.1, 0.93), (left + i + 0.1, 0.93), arrowstyle="-|>",
                                           mutation_scale=7, color=INK, zorder=5))
    for i, node in enumerate(kernel.nodes):
        moves = [(name, size, True) for name, size in kernel.reads.items() if kernel.readers[name] is node]
        moves += [(node.name, kernel.writes[node.name], False)] if node.name in kernel.writes else []
        for place, (name, size, read) in enumerate(moves):
            _move(axes, left + i + (place + 0.5) / len(moves), name, size, read)


def _move(axes: Axes, x: float, name: str, size: int, read: bool) -> None:
    ends = ((x, -0.08), (x, 0.62)) if read else ((x, 0.62), (x, -0.08))
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, linewidth=1.8, shrinkA=0, shrinkB=0,
                                   color=BLUE if read else ORANGE, zorder=4))
    axes.text(x + 0.03, 0.27, f"{size:,}", fontsize=6.5, color=INK, va="center")
    axes.text(x, -0.25, shortened(name, 11), fontsize=6.5, color=INK, ha="center", va="center")


def rounding(x: torch.Tensor, whole: torch.Tensor, others: Mapping[str, torch.Tensor]) -> Picture:
    """Over x, how far each of the other results lies from `whole`, in units of its last bit (ulp).

    The axis is logarithmic beyond 10 bits if any result is off by more than 1000. Text: whether any bit differs.
    """
    figure, shown = panels(9, 2.7, 1, len(others), sharey=True)
    size = whole.abs()
    ulp = torch.nextafter(size, torch.full_like(size, torch.inf)) - size
    far = any(float(((values - whole) / ulp).abs().max()) > 1000 for values in others.values())
    lines = []
    for axes, (name, values) in zip(shown, others.items(), strict=True):
        axes.plot(x.flatten(), ((values - whole) / ulp).flatten(), ".", markersize=1.2 if far else 2.5, color=BLUE)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        axes.set_title(f"{name}: {float((values != whole).float().mean()):.0%} have other bits", fontsize=9.5)
        if far:
            axes.set_yscale("symlog", linthresh=10, linscale=3)
            axes.set_yticks([-5, 5], ["−5", "5"], minor=True)
            axes.margins(y=0.1)
            for edge in (-10, 10):  # linear between them
                axes.axhline(edge, color=GREY, linewidth=0.4, linestyle=":", zorder=0)
        else:
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("x", fontsize=8)
        axes.tick_params(labelsize=8, which="both")
        lines.append(f"{name}: {'the same bits' if torch.equal(values, whole) else 'other bits'}")
    shown[0].set_ylabel("difference from torch's, in last bits", fontsize=8)
    return finish(figure, "Differences over x. " + "; ".join(lines) + ".", "\n".join(lines), colors=64)
