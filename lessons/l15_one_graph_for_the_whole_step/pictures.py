"""Small graphs as rows of letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from workbench.errors import WorkbenchError
from workbench.notebook.draw.colors import FAINT, GREEN, INK, NAMES, PAPER
from workbench.notebook.draw.picture import Picture, finish, panels
from workbench.recipe.wording import aligned


def operators_in_order(rows: Mapping[str, str], kinds: Mapping[str, str]) -> Picture:
    """A row for each graph, a box for each operator, from the first to the last.

    rows: title -> a letter for each operator. kinds: letter -> what it stands for, at most three; any other letter is
    an empty box. "|" is no operator: it is a dashed line, and kinds["|"] is what begins there. Text: the letters, one
    below the other. Raises WorkbenchError without any row, or for more kinds.
    """
    signs = [letter for letter in kinds if letter != "|"]
    if not rows or len(signs) > 3:
        raise WorkbenchError("operators_in_order: give one row or more, by title, and at most 3 kinds")
    colors = dict(zip(signs, NAMES, strict=False))
    dashed: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.1}
    figure, (axes,) = panels(9.6, 0.5 + 0.42 * len(rows))
    for y, letters in enumerate(rows.values()):
        if "|" in letters:
            axes.vlines(letters.index("|"), y - 0.47, y + 0.47, **dashed)
        for x, letter in enumerate(letters.replace("|", "")):
            axes.add_patch(Rectangle((x + 0.06, y - 0.36), 0.88, 0.72, facecolor=colors.get(letter, FAINT)))
            if letter in colors:
                axes.text(x + 0.5, y, letter, ha="center", va="center", fontsize=8.5,
                          color=PAPER if colors[letter] == GREEN else INK)
    most = max(len(letters.replace("|", "")) for letters in rows.values())
    axes.set(xlim=(0, most), ylim=(len(rows) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    handles: list[Artist] = [Patch(facecolor=color, label=f"{letter}: {kinds[letter]}")
                             for letter, color in colors.items()]
    if set().union(*rows.values()) - {*kinds}:
        handles.append(Patch(facecolor=FAINT, label="other operators"))
    if "|" in kinds:
        handles.append(Line2D([], [], **dashed, label=kinds["|"]))
    axes.legend(handles=handles, frameon=False, fontsize=8, ncols=len(handles), loc="lower left", bbox_to_anchor=(0, 1))
    alt = "Operators in their order. " + "; ".join(f"{title}: {letters}" for title, letters in rows.items()) + "."
    return finish(figure, alt, "\n".join(aligned([*rows.items()])), colors=64)
