"""The piece of memory of each buffer, from call to call; a generated loop; a loss in parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from workbench.lab.inside_inductor.function import Inside, look_inside
from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, PAPER, PINK, SKY
from workbench.notebook.draw.picture import Picture, Table, finish, panels, shortened, table
from workbench_lessons.l12_inside_inductor.buffers import buffers_of
from workbench_lessons.l12_inside_inductor.traffic import bytes_moved, loop_body

COLORS = {"allocated": BLUE, "reuses": SKY, "from a pool": GREEN, "by eager": PINK}


def buffers(inside: Inside, title: str = "buffers", *, most: int = 0, calls: Sequence[str] = ()) -> Picture:
    """A row for each piece of memory, a column for each kernel call; below, the bytes alive at each call.

    The peak is dark. A buffer whose size is known only in a run has a dashed frame, and does not count in the bytes.
    most: bytes at the top of the lower axis, so that two pictures have one scale; 0 leaves it to the peak.
    calls: what each call computes, in place of the names of kernels, and beside the names of buffers.
    """
    found = buffers_of(inside)
    rows, columns = max(found.allocations, 1), max(len(found.calls), 1)
    curve = found.peak > 0
    heights = (0.34 * rows + 0.3, *([0.9] if curve else []))
    figure, (lanes, *under) = panels(9, 0.9 + 0.34 * rows + curve, len(heights), sharex=True, height_ratios=heights)
    for each in found.buffers:
        known = each.bytes is not None
        lanes.barh(each.memory, each.last + 1 - each.first, 0.72, left=each.first, color=COLORS[each.how],
                   edgecolor=PAPER if known else INK, linewidth=1 if known else 1.6,
                   linestyle="-" if known else "--", label=each.how)
        label = f"{each.name}: {calls[each.first]}" if calls else each.name
        lanes.text(each.first + 0.06, each.memory, label, va="center", fontsize=8,
                   color=PAPER if each.how == "allocated" else INK)
    lanes.set_yticks(range(found.allocations), [_bytes(size) for size in found.memory], fontsize=8)
    lanes.invert_yaxis()
    lanes.set_title(f"{title}: {found.summary()}", fontsize=10)
    handles = dict(zip(*reversed(lanes.get_legend_handles_labels()), strict=True))
    lanes.legend(handles.values(), handles.keys(), frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    for below in under:
        at = found.alive.index(found.peak)
        colors = [INK if size == found.peak else GREY for size in found.alive]
        below.bar([i + 0.5 for i in range(len(found.alive))], found.alive, 0.9, color=colors)
        below.text(at + 0.5, found.peak, f"{found.peak:,}", ha="center", va="bottom", fontsize=8)
        below.set_ylabel("bytes held", fontsize=8)
        below.yaxis.set_major_formatter("{x:,.0f}")
        below.tick_params(axis="y", labelsize=8)
        below.set_ylim(0, 1.3 * (most or found.peak))
    last = [lanes, *under][-1]
    last.set(xlim=(0, columns))
    said = list(calls) or [_short(name) for name in found.calls]
    names = [f"{i}: {name}" for i, name in enumerate(said)] if columns < 10 else said
    last.set_xticks([i + 0.5 for i in range(len(found.calls))], names, fontsize=7.5,
                     rotation=0 if columns < 10 else 45, ha="center" if columns < 10 else "right")
    lines = [f"{title}: {found.summary()}"]
    for i, size in enumerate(found.memory):
        held = [f"{b.name} {b.how}, calls {b.first} to {b.last}" for b in found.buffers if b.memory == i]
        lines.append(f"  {_bytes(size)}: {'; '.join(held) or 'a pool'}")
    return finish(figure, "Buffers by the memory that they lie in, from call to call. " + lines[0] + ".",
                  "\n".join(lines), colors=64)


def loop(inside: Inside, title: str) -> Table:
    """The lines of the first generated loop, with those that load or store memory marked."""
    lines = loop_body(inside)
    marks = {(row, 1): SKY for row, (_, access) in enumerate(lines) if access}
    return replace(table(title, ("for each element", "memory"), lines, code=("for each element",)), fills=marks)


def in_parts(loss: Callable[..., torch.Tensor], count: int) -> Callable[..., torch.Tensor]:
    """The loss of the rows in so many parts, one after another."""

    def parted(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(count), target.chunk(count), strict=True)
        return torch.cat([loss(rows, weight, wanted) for rows, wanted in parts])

    return parted


def rows_in_parts(
    loss: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> Picture:
    """The peak, and the bytes loaded and stored, of a loss whose rows are cut into 1, 2, 4 and 8 parts."""
    counts = (1, 2, 4, 8)
    seen = [look_inside(in_parts(loss, count), x, weight, target) for count in counts]
    peaks, moved = [buffers_of(inside).peak for inside in seen], [bytes_moved(inside) for inside in seen]
    weights = [count * weight.nbytes for count in counts]
    figure, (left, right) = panels(9, 2.9, 1, 2)
    names = [str(count) for count in counts]
    left.bar(names, peaks, 0.7, color=INK)
    right.bar(names, weights, 0.7, color=GREEN, label="loads of the weight")
    rest = [size - part for size, part in zip(moved, weights, strict=True)]
    right.bar(names, rest, 0.7, bottom=weights, color=GREY, label="all else")
    right.legend(frameon=False, fontsize=8, loc="upper left")
    for axes, title, sizes in ((left, "peak, bytes", peaks), (right, "loaded and stored, bytes", moved)):
        for at, size in enumerate(sizes):
            axes.text(at, size, f"{size:,}", ha="center", va="bottom", fontsize=8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("parts that the rows are cut into", fontsize=8)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(labelsize=8)
        axes.set_ylim(0, 1.15 * max(sizes))
    lines = [f"{count} parts: peak {peak:,} bytes; {size:,} loaded and stored, {part:,} of them of the weight"
             for count, peak, size, part in zip(counts, peaks, moved, weights, strict=True)]
    return finish(figure, "Bars: the peak and the traffic of a loss in parts. " + "; ".join(lines) + ".",
                  "\n".join(lines), colors=64)


def _bytes(size: int | None) -> str:
    return "known at run time" if size is None else f"{size:,} B"


def _short(name: str) -> str:
    """`mm` for `extern_kernels.mm`, `relu_1` for `cpp_fused_relu_1`; of a long name the end, where names differ."""
    said = re.sub(r"^(extern_kernels\.|torch\.ops\.aten\.|(cpp|triton_\w+?)_fused_)|\.default$", "", name)
    return shortened(said, 14)
