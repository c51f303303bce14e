"""The magnitudes of a tensor above the numbers of float8, the time of layers, and the errors of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from workbench.notebook.draw.colors import BLUE, FAINT, GREEN, GREY, INK, ORANGE
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench_lessons.l05_bucket_and_overlap.stacked import stacked

LARGEST, ZERO = 448.0, 2.0**-10
"""Of e4m3: the largest number, and the largest magnitude that is rounded to 0."""


def float8_grid(rows: Mapping[str, torch.Tensor]) -> Picture:
    """A row for each tensor: its magnitudes on a logarithmic axis, above the numbers of e4m3.

    Values in the shaded part are rounded to 0, and drawn in orange; zeros themselves are left out. Text: how many.
    """
    figure, shown = panels(9, 0.9 + 1.1 * len(rows), len(rows), sharex=True)
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    magnitudes = {name: values.detach().float().abs().flatten() for name, values in rows.items()}
    least = min([ZERO / 8, *(float(found[found > 0].min()) / 2 for found in magnitudes.values() if bool(found.any()))])
    lines = []
    for axes, (name, found) in zip(shown, magnitudes.items(), strict=True):
        found = found[found > 0]
        lost = found.to(torch.float8_e4m3fn).float() == 0
        axes.axvspan(least, ZERO, color=FAINT, label="rounded to 0")
        axes.vlines(numbers, 0, 0.3, color=GREY, linewidth=0.6, label="numbers of e4m3")
        for which, color, said in ((~lost, BLUE, "kept"), (lost, ORANGE, "becomes 0")):
            axes.plot(found[which], [0.65] * int(which.sum()), "o", color=color, markersize=5, label=said)
        axes.set_xscale("log", base=2)
        axes.set(xlim=(least, 2 * LARGEST), ylim=(0, 1), yticks=[])
        lines.append(f"{name}: {int(lost.sum())} of {len(found)} become 0")
        axes.set_title(lines[-1], fontsize=9.5, loc="left", color=INK)
    shown[-1].set_xlabel("magnitude", fontsize=8)
    handles, labels = shown[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    text = "\n".join(lines)
    return finish(figure, "Magnitudes above the numbers of e4m3. " + "; ".join(lines) + ".", text, colors=64)


def layers_in_percent(products: Sequence[tuple[str, str, str, float, float, float]]) -> Picture:
    """Float8 matmuls and casts of each layer, in percent of its matmuls in bfloat16; the output layer stays bfloat16.

    products: as `recorded_products` gives them. A last bar for each model adds up its layers.
    """
    bars = {}
    for model in dict.fromkeys(row[0] for row in products):
        layers = [row for row in products if row[0] == model and row[1] != "output"]
        wide, narrow, casting = zip(*(row[3:] for row in layers), strict=True)
        rows = [*layers, (model, "sum of these", "", sum(wide), sum(narrow), sum(casting))]
        for name, part, shape, plain, scaled, casts in rows:
            title = f"{name} {part} {shape}".strip().replace(" x ", " × ")
            percent = {"float8 matmuls": 100 * scaled / plain, "casts": 100 * casts / plain}
            bars[f"{title}: {100 * (scaled + casts) / plain:.0f}"] = percent
    return stacked(bars, "time at 8,192 tokens, in percent of the layer's matmuls in bfloat16", line=("bfloat16", 100))


def errors_by_name(runs: Mapping[str, Mapping[str, float]]) -> Picture:
    """A row for each name, with a dot for the relative error in each of at most three runs. Text: the names of both."""
    names = list(next(iter(runs.values())))
    figure, (axes,) = panels(9, 0.9 + 0.24 * len(names))
    for (run, errors), color, marker in zip(runs.items(), (BLUE, GREEN, GREY), "os^", strict=False):
        axes.plot([100 * errors[name] for name in names], range(len(names)), marker, color=color, markersize=5,
                  linestyle="", label=run)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel="error of the gradient, %", ylim=(len(names) - 0.5, -0.5))
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    text = f"{', '.join(runs)}: errors of {len(names)} gradients"
    return finish(figure, f"Dots for the error of each gradient. {text}.", text, colors=64)
