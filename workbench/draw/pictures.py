"""Static pictures: a PNG for the eye and the same facts as text, which a notebook test can compare."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from workbench.errors import WorkbenchError
from workbench.recipe import Recipe
from workbench.report import Report
from workbench.world.simulated import shards

# Okabe and Ito's palette: told apart by colour-blind readers.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_BADGES = {"PASS": "#009E73", "FAIL": "#D55E00", "NO_EFFECT": "#F0E442", "UNKNOWN": "#999999"}


@dataclass(frozen=True)
class Picture:
    """A picture and its text form. A notebook shows the PNG; `text` is the output that tests compare."""

    png: bytes
    text: str

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return self.text


def _picture(figure: Figure, text: str) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Description": text})
    return Picture(buffer.getvalue(), text)


def losses(report: Report) -> Picture:
    """The mean loss of each training step. Raises WorkbenchError for a run that did not train."""
    if report.training is None:
        raise WorkbenchError("this run did not train: run the recipe on gloo or nccl ranks")
    values = report.training.losses
    figure = Figure(figsize=(6, 2.6))
    axes = figure.add_subplot()
    axes.plot(range(1, len(values) + 1), values, color=_COLOURS[0], marker="o", markersize=3)
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title=f"{report.recipe.name}: {len(values)} steps")
    axes.spines[["top", "right"]].set_visible(False)
    way = "falls" if values[-1] < values[0] else "does not fall"
    return _picture(figure, f"loss of {len(values)} steps: it {way}")


def _found(whole: torch.Tensor, part: torch.Tensor) -> tuple[int, int]:
    for row, column in (whole == part[0, 0]).nonzero().tolist():
        if torch.equal(whole[row : row + part.shape[0], column : column + part.shape[1]], part):
            return row, column
    raise WorkbenchError("a rank's shard is not one block of the whole tensor")


def placements(name: str, parameter: Any) -> Picture:
    """Where each rank's block of a matrix lies, a DTensor in a simulated world. Blocks are found by their values."""
    logging.disable(logging.WARNING)  # torch warns that gathering over two axes is slow
    try:
        whole = next(iter(shards(parameter.full_tensor()).values()))
    finally:
        logging.disable(logging.NOTSET)
    if whole.dim() != 2:
        raise WorkbenchError(f"{name} has {whole.dim()} dimensions: only matrices are drawn")
    blocks: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, part in shards(parameter).items():
        if part.numel():
            blocks.setdefault((*_found(whole, part), *part.shape), []).append(rank)
    rows, columns = whole.shape
    figure = Figure(figsize=(5, 3.2))
    axes = figure.add_subplot()
    lines = [f"{name}: {rows} x {columns}, placements {tuple(str(p) for p in parameter.placements)}"]
    for i, ((row, column, height, width), ranks) in enumerate(sorted(blocks.items())):
        colour = _COLOURS[i % len(_COLOURS)]
        axes.add_patch(Rectangle((column, row), width, height, facecolor=colour, alpha=0.55, edgecolor="black"))
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        axes.text(column + width / 2, row + height / 2, who, ha="center", va="center")
        lines.append(f"{who}: rows {row} to {row + height - 1}, columns {column} to {column + width - 1}")
    axes.set(xlim=(0, columns), ylim=(rows, 0), xlabel="columns", ylabel="rows", title=name)
    return _picture(figure, "\n".join(lines))


def pipeline(subject: Recipe | Report) -> Picture:
    """The stages and passes of a recipe in order; for a report, each pass with its verdict."""
    recipe = subject.recipe if isinstance(subject, Report) else subject
    badge = {row.name: str(row.outcome) for row in subject.passes} if isinstance(subject, Report) else {}
    steps = [
        "author", "capture", *(p.name for p in recipe.joint_passes), "partition",
        *(p.name for p in recipe.passes), "compile", "train",
    ]
    listed = set(recipe.pass_names)
    figure = Figure(figsize=(6, 0.55 * len(steps)))
    axes = figure.add_subplot()
    for i, step in enumerate(steps):
        y = len(steps) - i
        colour = "#FFFFFF" if step not in listed else "#DCEBF5"
        box = FancyBboxPatch((0.5, y - 0.3), 5, 0.6, boxstyle="round,pad=0.05", facecolor=colour, edgecolor="#333333")
        axes.add_patch(box)
        axes.text(3, y, step, ha="center", va="center", fontsize=9)
        if step in badge:
            axes.text(5.8, y, badge[step], va="center", fontsize=9, backgroundcolor=_BADGES[badge[step]])
        if i:
            axes.annotate("", (3, y + 0.38), (3, y + 0.62), arrowprops={"arrowstyle": "->"})
    axes.set(xlim=(0, 8), ylim=(0.4, len(steps) + 0.6))
    axes.axis("off")
    return _picture(figure, " > ".join(f"{s} [{badge[s]}]" if s in badge else s for s in steps))
