"""The loss of a run, step by step."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.ticker import MaxNLocator

from workbench.notebook.draw.picture import BLUE, GREY, ORANGE, Picture, finish, panels
from workbench.pipeline.report import Report, check_expectations


def losses(what: Report | Mapping[str, Report]) -> Picture:
    """The mean loss over the data-parallel ranks at each step, of a run or of several by name.

    ValueError where a run trained nothing.
    """
    runs = {"": what} if isinstance(what, Report) else dict(what)
    figure, (axes,) = panels(7, 2.8)
    fell = []
    for (name, run), color, line in zip(runs.items(), (BLUE, ORANGE, GREY), ("-", "--", ":"), strict=False):
        if run.training is None:
            raise ValueError(f"a {run.world['kind']} world trains nothing: run on real ranks")
        values = run.training.losses
        axes.plot(range(1, len(values) + 1), values, line, color=color, marker="o", markersize=3, label=name)
        axes.axhline(values[0], color=GREY, linestyle=":", linewidth=1)
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
