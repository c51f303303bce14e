"""What schedules hold on each rank, where two ranks' transfers do not match, and steps that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from workbench.lab.pipeline.estimate import BARS, Estimate
from workbench.lab.pipeline.plan import Action, Plan, Span
from workbench.notebook.draw.colors import GREY, INK, ORANGE, PINK, SKY
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.recorded_figures import json_lines

WRONG = "#f5c7a9"
VARIANTS = {
    "workbench_1f1b": "1F1B, ours", "torch_1f1b": "1F1B, torch on plain modules",
    "workbench_zero_bubble": "zero bubble (ZBV), ours",
    "torch_zero_bubble": "zero bubble (ZBV), torch on plain modules",
}
"""Of benchmarks/pipeline.py, those of four ranks."""


def lanes(axes: Axes, spans: Iterable[Span], ranks: int, total: float) -> list[Patch]:
    """A lane for each rank up to `total`, grey where it waits, and a bar for each computation; the legend's entries."""
    axes.barh(range(ranks), total, color=GREY, alpha=0.25)
    kinds = set()
    for rank, action, begin, end in spans:
        kinds.add(action.kind)
        axes.barh(rank, end - begin, left=begin, color=BARS[action.kind][1], edgecolor=GREY, linewidth=0.5)
        if end > begin:
            axes.text((begin + end) / 2, rank, f"{action.kind}{action.microbatch}", ha="center", va="center",
                      fontsize=7, color="white" if action.kind in "FB" else INK)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.45, -0.55)
    bars = [Patch(color=color, label=label) for kind, (label, color) in BARS.items() if kind in kinds]
    return [*bars, Patch(color=GREY, alpha=0.25, label="bubble")]


def over_time(steps: Mapping[str, Estimate]) -> Picture:
    """A panel for each step, on one axis of time. Below the first one, a dashed line stands where it ends."""
    (first, longest), *_ = steps.items()
    count, until = len(longest.plan.ranks), max(step.total_ms for step in steps.values())
    figure, panes = panels(9.6, 0.9 + (0.4 + 0.4 * count) * len(steps), rows=len(steps), sharex=True)
    entries = dict[str, Patch]()
    for axes, (name, step) in zip(panes, steps.items(), strict=True):
        entries |= {str(patch.get_label()): patch for patch in lanes(axes, step.spans, count, step.total_ms)}
        axes.set_title(f"{name}: {step.total_ms:.1f} ms, bubble {100 * step.bubble:.1f} %", loc="left", fontsize=10)
        if step is not longest:
            axes.axvline(longest.total_ms, color=INK, linestyle="--", linewidth=1)
            axes.annotate(f"{first} ends", (longest.total_ms, 0), (-5, 0), textcoords="offset points", ha="right",
                          va="center", fontsize=9)
    panes[-1].set(xlim=(0, 1.002 * until), xlabel=f"ms, {longest.source}")
    grey = entries.pop("bubble")
    figure.legend(handles=[*entries.values(), grey], loc="outside upper right", ncols=5, frameon=False)
    text = "\n".join(f"{name}: bubble {100 * step.bubble:.1f} %" for name, step in steps.items())
    return finish(figure, "A lane of computations for each rank. " + text.replace("\n", "; ") + ".", text, colors=48)


def held(step: Estimate) -> list[int]:
    """The most bytes that each rank holds for microbatches; of several stages on a rank, the sum of each one's most."""
    rank_of = step.plan.rank_of
    return [sum(size for stage, size in enumerate(step.live) if rank_of[stage] == rank)
            for rank in range(len(step.plan.ranks))]


def schedules(steps: Mapping[str, Estimate]) -> Table:
    """Bubble, milliseconds, and bytes of the fullest rank."""
    rows = [(name, f"{100 * step.bubble:.1f} %", f"{step.total_ms:.2f}", f"{max(held(step)) / 2**20:,.0f} MiB")
            for name, step in steps.items()]
    return table("one step, estimated only", ("schedule", "bubble", "ms", "held by the fullest rank, at most"), rows)


def memory(steps: Mapping[str, Estimate]) -> Picture:
    """For each rank a bar of each schedule: the most bytes that it holds for microbatches."""
    sizes = {name: [size / 2**20 for size in held(step)] for name, step in steps.items()}
    count = len(next(iter(sizes.values())))
    figure, (axes,) = panels(9.6, 0.9 + 0.18 * count * (1 + len(sizes)))
    for at, (name, row) in enumerate(sizes.items()):
        places = [rank + (at - (len(sizes) - 1) / 2) * 0.8 / len(sizes) for rank in range(count)]
        axes.barh(places, row, 0.76 / len(sizes), color=(PINK, SKY, ORANGE)[at], label=name)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
    axes.set(ylim=(count - 0.5, -0.5), xlabel="MiB held for microbatches, at most")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    text = "\n".join(f"{name}: " + ", ".join(f"{size:,.0f}" for size in row) + " MiB" for name, row in sizes.items())
    return finish(figure, "Bars of the bytes that each rank holds. " + text.replace("\n", "; ") + ".", text, colors=48)


def length(step: Estimate, kind: str, stage: int) -> float:
    """Milliseconds of a stage's computation of this kind; each microbatch takes as long."""
    return next(end - begin for _, action, begin, end in step.spans if action[:2] == (kind, stage))


def halves(whole: Estimate, split: Estimate, stage: int, evidence: Mapping[str, int | float]) -> Table:
    """A stage's backward, whole and in its two halves. evidence: of `split_backward`."""
    first, second = evidence["first"], evidence["second"]
    ms = [length(whole, "B", stage), length(split, "I", stage), length(split, "W", stage)]
    rows = zip(("whole", "I: the rank before waits for it", "W: nobody waits for it"), (first + second, first, second),
               [f"{each:.2f}" for each in ms], strict=True)
    return table(f"a backward of stage {stage}, estimated", ("", "operators", "ms"), list(rows),
                 f"I and W together take {100 * (ms[1] + ms[2]) / ms[0] - 100:.0f} % longer than the whole",
                 f"W reads {evidence['held_bytes'] / 2**20:.0f} MiB, which stay until it has run")


def transfers(plan: Plan, one: int, other: int) -> Table:
    """What two ranks launch to each other, in order, up to the first place where they do not match."""
    sides = [[action for action in plan.ranks[rank] if _to(plan, action, peer)]
             for rank, peer in ((one, other), (other, one))]
    rows = list(zip(*sides, strict=False))
    wrong = next((at for at, (left, right) in enumerate(rows) if left.other != right), len(rows) - 1)
    cells = tuple((at + 1, *map(_said, rows[at])) for at in range(wrong + 1))
    fills = {} if rows[wrong][0].other == rows[wrong][1] else {(wrong, 1): WRONG, (wrong, 2): WRONG}
    return Table("transfers between two ranks, in order", ("", f"rank {one}", f"rank {other}"), cells, fills)


def _to(plan: Plan, action: Action, peer: int) -> bool:
    return len(action.kind) > 1 and plan.rank_of[action.other.stage] == peer


def _said(action: Action) -> str:
    return str(action).partition(" ")[2].partition(" ")[2]


def measured() -> Table:
    """Steps of a small llama3 on the CPU ranks of one machine, as benchmarks/pipeline.py recorded them."""
    rows = json_lines(results_dir() / "pipeline_16_cores.jsonl")
    first, cells = rows[0], []
    for variant, name in VARIANTS.items():
        mine = [row for row in rows if row["variant"] == variant]
        estimated = f"{100 * mine[0]['estimated_bubble']:.1f} %" if "estimated_bubble" in mine[0] else ""
        bubbles = [f"{100 * row['bubble']:.1f} %" for row in mine]
        steps = [f"{row['step_ms']:.0f}" for row in mine]
        cells.append((name, estimated, ", ".join(bubbles), ", ".join(steps)))
    machine = f"{first['machine']['cores']} cores, {first['threads']} threads a rank"
    versions = f"torch {first['versions']['torch'].partition('+')[0]}"
    return table(
        "a small llama3 of 8 layers on 4 CPU ranks, 8 microbatches",
        ("", "bubble, estimated for a CPU", "measured in each round", "ms a step"), cells,
        f"1F1B by the formula: {100 * first['ideal_1f1b']:.1f} %. Bubble: the share of a step in which no stage runs "
        f"on a rank, the mean of all ranks. {machine}, {versions}")
