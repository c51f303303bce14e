"""The stages from a recipe to a report, with the passes and their verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import FancyBboxPatch, Patch

from workbench.checks.verdicts import FILLS
from workbench.notebook.draw.colors import BLUE, FAINT, GREY, INK
from workbench.notebook.draw.picture import Picture, finish, new_figure
from workbench.pipeline.build import Built
from workbench.pipeline.report import Report
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import mesh_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOUNS = ("Recipe", "model on a\nWorld", "JointGraph", "Forward-\nBackward", "CompiledStep", "Report")
ARROWS = ("author", "capture", "partition", "compile", "train")
_PLACES = (0.75, 2.35, 4.4, 7.2, 9.2, 10.8)
_WIDE, _HIGH, _CHIP, _STEP = 1.15, 0.62, 2.5, 0.4
_CHANGED = "#dcebf5", BLUE  # inside and edge of what passes change


def pipeline(what: Recipe | Built | Report) -> Picture:
    """The stages from left to right, and the passes under the graph that they change.

    A recipe's passes show their declared numerics (exact, reduction order, lossy); those of a build or a report their
    gravest verdict, in words and colour.
    """
    recipe, world, badges = _read(what)
    columns = {
        2: [spec.name for spec in recipe.joint_passes],
        3: [spec.name for spec in recipe.passes],
    }
    rows = max(1, *map(len, columns.values()))
    height = 1.3 + _STEP * rows
    figure = new_figure(11.6, height)
    axes = figure.add_subplot()
    axes.set(xlim=(0, 11.6), ylim=(-height, 0))
    axes.axis("off")
    for i, (noun, x) in enumerate(zip(NOUNS, _PLACES, strict=True)):
        _box(axes, x, -0.6, _WIDE, _HIGH, noun, *(_CHANGED if i in columns else (FAINT, GREY)))
    for name, left, right in zip(ARROWS, _PLACES, _PLACES[1:], strict=False):
        start, end = left + _WIDE / 2 + 0.04, right - _WIDE / 2 - 0.04
        axes.annotate(
            "", (end, -0.6), (start, -0.6), arrowprops={"arrowstyle": "-|>", "color": INK}
        )
        axes.text((start + end) / 2, -0.16, name, ha="center", va="center", fontsize=9, color=INK, style="italic")
    axes.text(_PLACES[0], -1.1, recipe.name, ha="center", va="center", fontsize=9, color=INK)
    axes.text(
        _PLACES[1], -1.04, world.replace(" (", "\n("), ha="center", va="top", fontsize=9, color=INK
    )
    for i, names in columns.items():
        title = ("joint passes" if i == 2 else "passes") + ("" if names else ": none")
        axes.text(_PLACES[i], -1.1, title, ha="center", va="center", fontsize=9, color=INK)
        for row, name in enumerate(names):
            _chip(axes, _PLACES[i], -1.42 - _STEP * row, name, badges[name])
    inside, edge = _CHANGED
    axes.legend(
        handles=[Patch(facecolor=inside, edgecolor=edge, label="passes change it")],
        loc="lower right",
        fontsize=9,
        frameon=False,
    )
    lines = [f"{recipe.name} on {world}", " > ".join(
        [NOUNS[0], *(f"{a} > {n}" for a, n in zip(ARROWS, (n.replace("-\n", "").replace("\n", " ") for n in NOUNS[1:]),
                                                   strict=True))])]
    for i, where in ((2, "joint passes"), (3, "passes")):
        lines.append(
            f"{where}: " + (", ".join(f"{name} {badges[name][0]}" for name in columns[i]) or "none")
        )
    alt = "The pipeline from recipe to report. " + ". ".join([lines[0], *lines[2:]]) + "."
    return finish(figure, alt, "\n".join(lines))


def _read(what: Recipe | Built | Report) -> tuple[Recipe, str, dict[str, tuple[str, str]]]:
    """The recipe, the ranks in words, and (word, colour) for each pass."""
    if isinstance(what, Recipe):
        badges = {}
        for name in what.pass_names:
            contract = CONTRACTS.get(name)
            badges[name] = (str(contract.numerics).replace("_", " ") if contract else "own", FAINT)
        return what, _axes(what, f"{what.mesh.world_size} ranks"), badges
    if isinstance(what, Report):
        found = {row.name: row.outcome for row in what.passes}
        ranks = f"{what.world['size']} {what.world['kind']} ranks"
        recipe = what.recipe
    else:
        found = {record.name: record.outcome for record in what.records}
        world, given = what.authored.world, what.authored.recipe
        if given is None:
            raise ValueError(
                "this module was authored without a recipe: there is no pipeline to draw"
            )
        ranks, recipe = f"{world.size} {world.kind} ranks", given
    return recipe, _axes(recipe, ranks), {n: (str(o), FILLS[o]) for n, o in found.items()}


def _axes(recipe: Recipe, ranks: str) -> str:
    return f"{ranks} ({mesh_text(recipe.mesh.axes)})" if recipe.mesh.axes else ranks


def _box(
    axes: Axes, x: float, y: float, wide: float, high: float, text: str, fill: str, edge: str
) -> None:
    axes.add_patch(FancyBboxPatch((x - wide / 2, y - high / 2), wide, high, boxstyle="round,pad=0,rounding_size=0.08",
                                  facecolor=fill, edgecolor=edge, linewidth=1.2))
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color=INK, weight="bold")


def _chip(axes: Axes, x: float, y: float, name: str, badge: tuple[str, str]) -> None:
    word, fill = badge
    left, high = x - _CHIP / 2, _STEP - 0.08
    axes.add_patch(FancyBboxPatch((left, y - high / 2), _CHIP, high, boxstyle="round,pad=0,rounding_size=0.05",
                                  facecolor=fill, edgecolor=GREY, linewidth=0.8))
    axes.text(
        x, y + 0.075, name, ha="center", va="center", fontsize=9, color=INK, family="monospace"
    )
    axes.text(x, y - 0.085, word, ha="center", va="center", fontsize=8, color=INK,
              weight="bold" if fill != FAINT else "normal")

