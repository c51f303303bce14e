"""Each list of passes as a row of boxes: its passes in order, their verdicts, what it costs, and the complaint."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from workbench.checks.record import Verdict
from workbench.graph.read.memory import gathered_parameters_kept
from workbench.notebook.draw.colors import INK, RED
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench_lessons.l13_find_the_wrong_pass.examine import Case, gathers

PASS, OTHER = "#bfe8da", "#f8e0d2"  # GREEN and RED, as backgrounds
_LABEL, _CELLS, _ROW = 0.75, (0.36, 0.46, 0.72), 0.72  # inches
_BOX, _HEAD = sum(_CELLS) + 0.14, 0.3
SOFT = "#555555"


def verdicts_of(cases: Mapping[str, Case], complaints: Mapping[str, str]) -> Picture:
    """A row for each pipeline: green where a verdict is PASS. At its end: the forward's gathers, and the complaint.

    What the forward keeps of gathered weights is told only where the complaint is about that.
    """
    most = max(len(records) for records, _ in cases.values())
    width, height = _LABEL + _BOX * most + 2.3, _HEAD - 0.1 + _ROW * len(cases)
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(-height, 0))
    axes.axis("off")
    lines, right = [], _LABEL + _BOX * most + 0.05
    for x, text in ((_LABEL, "the passes of each list, in order; a green check says PASS"), (right, "complaint")):
        axes.text(x, -0.15, text, va="center", fontsize=9, color=SOFT)
    for i, (name, (records, pair)) in enumerate(cases.items()):
        y = -_HEAD - _ROW * (i + 0.5)
        axes.text(_LABEL - 0.12, y, name, ha="right", va="center", fontsize=10, fontweight="bold", color=INK)
        for j, record in enumerate(records):
            x = _LABEL + _BOX * j
            axes.text(x, y + 0.2, record.name, va="center", fontsize=7.5 if len(record.name) > 20 else 9, color=INK)
            for verdict, wide in zip(record.verdicts, _CELLS, strict=True):
                _cell(axes, x, y - 0.06, wide - 0.03, verdict)
                x += wide
        outcomes = [str(verdict.outcome) for record in records for verdict in record.verdicts]
        complaint = complaints.get(name, "no complaint")
        facts = f"{len(gathers(pair.forward))} all-gathers"
        if "keeps" in complaint:
            kept = sum(row.bytes for row in gathered_parameters_kept(pair.forward, pair.backward))
            facts += f", {kept:,} B kept"
        color = RED if name in complaints else SOFT
        axes.text(right, y + 0.1, complaint, va="center", fontsize=9, color=color)
        axes.text(right, y - 0.1, facts, va="center", fontsize=8.5, color=SOFT)
        lines.append(f"{name}: {', '.join(record.name for record in records)}: {outcomes.count('PASS')} of "
                     f"{len(outcomes)} verdicts PASS; {facts}; {complaint}")
    return finish(figure, "Rows of boxes, green where a verdict is PASS. " + ". ".join(lines) + ".", "\n".join(lines))


def _cell(axes: Axes, x: float, y: float, wide: float, verdict: Verdict) -> None:
    """One check of one pass: green for PASS."""
    fill = PASS if str(verdict.outcome) == "PASS" else OTHER
    axes.add_patch(Rectangle((x, y - 0.11), wide, 0.22, facecolor=fill))
    axes.text(x + wide / 2, y, verdict.check, ha="center", va="center", fontsize=7.5, color=INK)
