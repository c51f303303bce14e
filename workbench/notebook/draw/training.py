"""The loss of a run, step by step."""

from __future__ import annotations

from matplotlib.ticker import MaxNLocator

from workbench.notebook.draw.picture import BLUE, GREY, Picture, finish, panels
from workbench.pipeline.report import Report, check_expectations


def losses(report: Report) -> Picture:
    """The mean loss over the data-parallel ranks at each step. ValueError where the run trained nothing."""
    if report.training is None:
        raise ValueError(f"a {report.world['kind']} world trains nothing: run on real ranks")
    values = report.training.losses
    figure, (axes,) = panels(7, 2.8)
    axes.plot(range(1, len(values) + 1), values, color=BLUE, marker="o", markersize=3)
    axes.axhline(values[0], color=GREY, linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats a byte)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    size = report.world["size"]
    axes.set_title(f"{report.recipe.name}: {len(values)} steps on {size} {report.world['kind']} ranks", fontsize=10)
    recipe = report.recipe.override({"expect.loss_falls": True})
    fell = check_expectations(recipe, report.training, report.saved_bytes)[0].outcome
    text = f"loss of {len(values)} steps on {size} {report.world['kind']} ranks; loss falls: {fell}"
    return finish(figure, f"A curve of the training {text}.", text)
