"""Memory budgets as they were estimated and as they ran on GPUs, for "Split forward and backward"."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import mean

from workbench.notebook.draw.colors import BLUE, INK, ORANGE
from workbench.notebook.draw.picture import Picture, Table, finish, panels, table
from workbench.recipe.files import json_lines
from workbench.tools.compatibility import results_dir

MEASURED, ESTIMATED = "memory_budget_h200x2.jsonl", "budgets.json"
GIB, RESHARD, FULL = 2**30, "_reshard", "full_checkpointing"


@dataclass(frozen=True)
class Budget:
    """A measured step. gib: saved for the backward. longer: milliseconds beyond the step without a budget. estimated:
    the same by the plan; None where no plan chose. regathers: whether the backward gathers the weights again, as full
    checkpointing does. rounds: the median step of each round, in milliseconds. peak: GiB.
    """

    name: str
    gib: float
    longer: float
    estimated: float | None
    regathers: bool
    rounds: tuple[float, ...]
    peak: float


def measured_budgets() -> list[Budget]:
    """The steps that were measured: without a budget first, then by the bytes saved."""
    results = results_dir()
    lines = json_lines(results / MEASURED)
    estimated = {row["variant"]: row["ms"] for row in json.loads((results / ESTIMATED).read_text())["rows"]}
    rounds = {variant: tuple(line["step_ms"] for line in lines if line["variant"] == variant)
              for variant in dict.fromkeys(line["variant"] for line in lines)}
    first, *_ = rounds
    last = {line["variant"]: line for line in lines}
    found = [Budget(_name(variant, variant == first), last[variant]["saved_gib"], mean(ms) - mean(rounds[first]),
                    estimated.get(variant), variant.endswith((RESHARD, FULL)), ms, last[variant]["peak_gib"])
             for variant, ms in rounds.items()]
    return sorted(found, key=lambda each: -each.gib)


def _name(variant: str, first: bool) -> str:
    gib = variant.removesuffix(RESHARD).rpartition("_budget_")[2]
    return "no budget" if first else f"{gib} GiB" if gib != variant else "full checkpointing"


def draw_budgets() -> Picture:
    """GiB saved against milliseconds longer: estimates in blue, and a star for each measured step.

    Line: plans that keep the weights. Circles: plans of steps that gather them again, each below its star.
    """
    front = json.loads((results_dir() / ESTIMATED).read_text(encoding="utf-8"))["front"]
    figure, (axes,) = panels(7.6, 3.2)
    axes.plot([each["bytes"] / GIB for each in front], [each["ms"] for each in front], "-", color=BLUE, linewidth=1.4,
              label="estimated, weights kept")
    lines, shown = [], set()
    for each in measured_budgets():
        label = f"measured, weights {'gathered again' if each.regathers else 'kept'}"
        axes.plot([each.gib], [each.longer], "*", color=ORANGE, markersize=13, zorder=5,
                  markerfacecolor="none" if each.regathers else ORANGE, label=None if label in shown else label)
        shown.add(label)
        if each.regathers and each.estimated is not None:
            circle = label.replace("measured", "estimated")
            axes.plot([each.gib] * 2, [each.estimated, each.longer], ":", color=BLUE, linewidth=1.2, zorder=2)
            axes.plot([each.gib], [each.estimated], "o", color=BLUE, markerfacecolor="white", markersize=6, zorder=4,
                      label=None if circle in shown else circle)
            shown.add(circle)
        place = {"xytext": (8, 4)} if not each.regathers else {"xytext": (-6, -7), "ha": "right", "va": "top"}
        if each.name.startswith("full"):
            place |= {"xytext": (-22, -8), "ha": "left"}
        axes.annotate(each.name.replace(" c", "\nc"), (each.gib, each.longer), textcoords="offset points", fontsize=9,
                      color=INK, **place)
        told = "" if each.estimated is None else f", estimated {each.estimated:.1f} ms"
        lines.append(f"{label}, {each.name}: {each.gib:.1f} GiB saved, {each.longer:.1f} ms longer{told}")
    axes.set(xlabel="GiB saved for the backward", ylabel="ms longer than without a budget", xlim=(0, None),
             ylim=(-5, None))
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    title = "llama3 1b on 2 H200: budgets, estimated and measured"
    axes.set_title(title, fontsize=10)
    return finish(figure, f"{title}. " + "; ".join(lines) + ".", "\n".join([title, *lines]), colors=64)


def budget_table() -> Table:
    """The measured steps, with what they saved, their peak and their time, beside the plans' estimates."""
    line = json_lines(results_dir() / MEASURED)[0]
    machine, torch = line["machine"]["gpus"], line["versions"]["torch"]
    rows = [(each.name, "gathered again" if each.regathers else "kept", f"{each.gib:.1f}", f"{each.peak:.1f}",
             ", ".join(f"{ms:.1f}" for ms in each.rounds), f"{each.longer:.1f}",
             "" if each.estimated is None else f"{each.estimated:.1f}") for each in measured_budgets()]
    columns = ("budget", "weights", "GiB saved", "peak GiB", "step ms, each round", "ms longer", "estimated ms longer")
    told = f"each round is the median of {len(line['steps_ms'])} steps; ms longer compares means of the rounds"
    return table("budgets, measured", columns, rows, told,
                 f"recorded on {len(machine)} {machine[0]}, torch {torch}")
