"""Runs of a recipe: the loss step by step, and the variants of an ablation on one scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, GREY, INK, RED
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.tools.ablate import Ablation


def ablation(found: Ablation) -> Picture:
    """One line for each variant: its runs as dots, its median as a bar; behind them the band of the recipe itself.

    ValueError where the recipe did not run.
    """
    rows = [row for row in found.rows if row.steps]
    names = [row.name + (f" ({len(row.steps)} of {found.repeats} runs)" if len(row.steps) < found.repeats else "")
             for row in rows]
    base = found.rows[0]
    if not base.steps:
        raise ValueError(f"recipe {found.recipe!r} did not run, so there is nothing to compare with: {base.problem}")
    figure, (axes,) = panels(7.5, 0.9 + 0.32 * len(rows))
    axes.axvspan(base.step - base.band, base.step + base.band, color=FAINT)
    axes.axvline(base.step, color=GREY, linestyle=":", linewidth=1)
    for i, row in enumerate(rows):
        noise = row is base or not found.compared(row).endswith("ms")
        color = GREY if noise else BLUE if row.step < base.step else RED
        axes.plot(row.steps, [i] * len(row.steps), "o", color=color, markersize=4, alpha=0.6)
        axes.plot([row.step], [i], "|", color=INK, markersize=12)
        axes.annotate("" if noise else found.compared(row), (max(row.steps), i), xytext=(6, -3),
                      textcoords="offset points", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("a step, ms: each run, and the median; grey: within noise of the recipe")
    axes.margins(x=0.12)
    text = "\n".join([f"{found.recipe} on {found.world}: {len(rows)} variants, {found.repeats} runs each",
                      *(f"{name}: {row.saved:,} bytes saved, {row.collectives} collectives, {row.verdicts}"
                        for name, row in zip(names, rows, strict=True))])
    return finish(figure, f"Step times of {len(rows)} variants of {found.recipe}, each run a dot.", text)


def curves(runs: Mapping[str, Sequence[float]], title: str, label: str = "loss", *, at: Sequence[float] = (),
           axis: str = "step", colors: Sequence[str] = (BLUE, GREEN, GREY)) -> Picture:
    """The loss of each run over its steps, or what `label` says, at most three runs; orange stays free for faults.

    at, axis: where the values lie and of what, if not at steps 1, 2, 3. colors: of the runs, for a page where blue or
    green means something else.
    """
    figure, (axes,) = panels(8, 3.0)
    for (name, values), color, line in zip(runs.items(), colors, ("-", "--", ":"), strict=False):
        axes.plot(at or range(1, len(values) + 1), values, line, color=color, linewidth=1.2, label=name,
                  marker="o" if at else "", markersize=4)
    axes.set(xlabel=axis, ylabel=label)
    if at:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, color=INK)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)  # never on a curve
    points = {name: ", ".join(f"{y:.0f} at {x:,}" for x, y in zip(at, values, strict=True)) if at
              else f"{len(values)} {axis}s" for name, values in runs.items()}
    text = f"{title}: " + "; ".join(f"{name}, {said}" for name, said in points.items())
    return finish(figure, f"Curves of the {label}. {text}.", text, colors=64)
