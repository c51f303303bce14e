"""What schedules hold on each rank, where two ranks' transfers do not match, and steps that were measured."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.lab.pipeline.estimate import Estimate
from workbench.lab.pipeline.plan import Action, Plan
from workbench.notebook.draw.colors import ORANGE, PINK, SKY
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.tools.compatibility import results_dir
from workbench_lessons.course.recorded_figures import json_lines

WRONG = "#f5c7a9"
VARIANTS = {"workbench_1f1b": "1F1B, these graphs", "torch_1f1b": "1F1B, torch on plain modules"}
"""Of benchmarks/pipeline.py, those that were timed on four ranks."""


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


def halves(step: Estimate, stage: int, evidence: Mapping[str, int | float]) -> Table:
    """A stage's backward, and its half that `split_backward` moved behind the rest. evidence: of that pass."""
    whole = next(end - begin for _, action, begin, end in step.spans if action[:2] == ("B", stage))
    rows = [("whole backward", evidence["first"] + evidence["second"], f"{whole:.2f}"),
            ("W: what can wait", evidence["second"], f"{evidence['moved_ms']:.2f}")]
    return table(f"a backward of stage {stage}", ("", "operators", "ms"), rows,
                 f"W's inputs are {evidence['held_bytes'] / 2**20:.0f} MiB, kept until it has run")


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
    cells = []
    for variant, name in VARIANTS.items():
        mine = [row for row in rows if row["variant"] == variant]
        cells.append((name, ", ".join(f"{row['step_ms']:.0f}" for row in mine),
                      ", ".join(f"{100 * row['bubble']:.1f} %" for row in mine)))
    first = rows[0]
    title = "a small llama3 of 8 layers on 4 CPU ranks, 8 microbatches"
    machine = f"{first['machine']['cores']} cores, {first['threads']} threads a rank"
    versions = f"torch {first['versions']['torch'].partition('+')[0]}"
    return table(title, ("", "a step in each round, ms", "bubble"), cells,
                 f"Ideal 1F1B: {100 * first['ideal_1f1b']:.1f} %. These graphs, estimated for a CPU: "
                 f"{100 * first['estimated_bubble']:.1f} %. Bubble: the share of a step in which no stage runs on a "
                 f"rank, the mean of all ranks. {machine}, {versions}")
