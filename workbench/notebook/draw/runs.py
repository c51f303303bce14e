"""Runs of a recipe: the loss step by step, and curves of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from workbench.notebook.draw.colors import BLUE, GREEN, GREY, INK, ORANGE
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.pipeline.report import Report, check_expectations


def losses(what: Report | Mapping[str, Report]) -> Picture:
    """The mean loss over the data-parallel ranks at each step, of a run or of several by name.

    ValueError where a run trained nothing.
    """
    runs = {"": what} if isinstance(what, Report) else dict(what)
    figure, (axes,) = panels(7, 2.8)
    fell: list[str] = []
    for (name, run), color, line in zip(runs.items(), (BLUE, ORANGE, GREY), ("-", "--", ":"), strict=False):
        if run.training is None:
            raise ValueError(f"a {run.world['kind']} world trains nothing: run on real ranks")
        values = run.training.losses
        axes.plot(range(1, len(values) + 1), values, line, color=color, marker="o", markersize=3, label=name)
        axes.axhline(values[0], color=GREY, linestyle=":", linewidth=1, label="" if fell else "loss of the first step")
        expected = run.recipe.override({"expect.loss_falls": True})
        fell.append(f"{name} {check_expectations(expected, run.training, run.saved_bytes)[0].outcome}".strip())
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ranks = f"{len(values)} steps on {run.world['size']} {run.world['kind']} ranks"
    axes.set_title(f"{run.recipe.name}: {ranks}", fontsize=10)
    if len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)
    text = f"loss of {ranks}; loss falls: {', '.join(fell)}"
    return finish(figure, f"A curve of the training {text}." if len(runs) == 1 else f"Curves of the training {text}.",
                  text)


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
