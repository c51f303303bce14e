"""The stages from a recipe to a report, with the passes and their verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.patches import FancyBboxPatch, Patch

from workbench.checks.verdicts import FILLS
from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import BLUE, FAINT, GREY, INK
from workbench.notebook.draw.picture import Picture, finish, panels, shortened
from workbench.pipeline.build import Built
from workbench.pipeline.report import Report
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import mesh_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGES = {"Recipe": 0.75, "model on a\nWorld": 2.35, "JointGraph": 4.4, "Forward-\nBackward": 7.2,
          "CompiledStep": 9.2, "Report": 10.8}
"""What a stage hands to the next, and its place."""
ARROWS = ("author", "capture", "partition", "compile", "train")
ROAD = ("Recipe > author > model on a World > capture > JointGraph > partition > "
        "ForwardBackward > compile > CompiledStep > train > Report")
_ROW = 0.4  # the height of a pass
_CHANGED = "#dcebf5", BLUE  # inside and edge of what passes change
_TEXT: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": INK}


def pipeline(what: Recipe | Built | Report) -> Picture:
    """The stages from left to right, and the passes under the graph that they change.

    A recipe's passes show their declared numerics (exact, reduction order, lossy); those of a build or a report their
    gravest verdict, in words and colour.
    """
    recipe, ranks, badges = _read(what)
    if recipe.mesh.axes:
        ranks += f" ({mesh_text(recipe.mesh.axes)})"
    lists = {"joint passes": [spec.name for spec in recipe.joint_passes],
             "passes": [spec.name for spec in recipe.passes]}
    height = 1.3 + _ROW * max(1, *map(len, lists.values()))
    figure, (axes,) = panels(11.6, height)
    axes.set(xlim=(0, 11.6), ylim=(-height, 0))
    axes.axis("off")
    places = list(STAGES.values())
    for noun, x in STAGES.items():
        fill, edge = _CHANGED if x in places[2:4] else (FAINT, GREY)
        _box(axes, x, -0.6, 1.15, 0.62, fill, edge)
        axes.text(x, -0.6, noun, **_TEXT, weight="bold")
    for name, left, right in zip(ARROWS, places, places[1:], strict=False):
        axes.annotate("", (right - 0.615, -0.6), (left + 0.615, -0.6),
                      arrowprops={"arrowstyle": "-|>", "color": INK})
        axes.text((left + right) / 2, -0.16, name, **_TEXT, style="italic")
    axes.text(places[0], -1.1, shortened(recipe.name, 18, 9), **_TEXT)
    axes.text(places[1], -1.17, ranks.replace(" (", "\n("), **_TEXT)
    lines = [f"{recipe.name} on {ranks}", ROAD]
    for (title, names), x in zip(lists.items(), places[2:4], strict=True):
        heading = title if names else f"{title}: none"
        axes.text(x, -1.1, heading, **_TEXT)
        for row, name in enumerate(names):
            word, fill = badges[name]
            y = -1.42 - _ROW * row
            _box(axes, x, y, 2.5, _ROW - 0.05, fill, GREY)
            axes.text(x, y + 0.07, name, **_TEXT, family="monospace")
            axes.text(x, y - 0.08, word, **_TEXT | {"fontsize": 8})
        listed = ", ".join(f"{name} {badges[name][0]}" for name in names)
        lines.append(f"{title}: {listed or 'none'}")
    inside, edge = _CHANGED
    legend = Patch(facecolor=inside, edgecolor=edge, label="passes change it")
    axes.legend(handles=[legend], loc="lower right", fontsize=9, frameon=False)
    alt = "The pipeline from recipe to report. " + ". ".join([lines[0], *lines[2:]]) + "."
    return finish(figure, alt, "\n".join(lines))


def _read(what: Recipe | Built | Report) -> tuple[Recipe, str, dict[str, tuple[str, str]]]:
    """The recipe, the ranks in words, and (word, colour) for each pass."""
    if isinstance(what, Recipe):
        claims = {name: str(CONTRACTS[name].numerics) if name in CONTRACTS else "own"
                  for name in what.pass_names}
        badges = {name: (claim.replace("_", " "), FAINT) for name, claim in claims.items()}
        return what, f"{what.mesh.world_size} ranks", badges
    recipe: Recipe | None
    if isinstance(what, Report):
        recipe, ranks = what.recipe, f"{what.world['size']} {what.world['kind']} ranks"
        outcomes = {row.name: row.outcome for row in what.passes}
    else:
        world = what.authored.world
        recipe, ranks = what.authored.recipe, f"{world.size} {world.kind} ranks"
        outcomes = {record.name: record.outcome for record in what.records}
    if recipe is None:
        raise WorkbenchError("a module that was authored without a recipe has no pipeline to draw")
    badges = {name: (str(outcome), FILLS[outcome]) for name, outcome in outcomes.items()}
    return recipe, ranks, badges


def _box(axes: Axes, x: float, y: float, wide: float, high: float, fill: str, edge: str) -> None:
    corner = x - wide / 2, y - high / 2
    axes.add_patch(FancyBboxPatch(corner, wide, high, boxstyle="round,pad=0,rounding_size=0.06",
                                  facecolor=fill, edgecolor=edge))
