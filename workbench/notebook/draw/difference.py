"""A change of a variant: figures and verdicts before and after."""

from __future__ import annotations

from workbench.checks.verdicts import FILLS, Outcome, columns
from workbench.notebook.draw.colors import BLUE, FAINT, GREY, INK, RED
from workbench.notebook.draw.picture import Picture, Table, finish, panels
from workbench.notebook.draw.verdicts import failures, grid
from workbench.pipeline.report_text import outcomes
from workbench.recipe.wording import counted
from workbench.tools.variant import Difference, Variant, number


def difference(found: Difference) -> Picture:
    """Collectives, memory and simulated time, before (grey) and after (blue), each relative to its larger value.

    Unchanged figures are pale. The end of the step's bar is its exposed communication. Text: every figure that changed,
    the stages that ran again and those that were kept.
    """
    was, now = found.before.figures, found.after.figures
    old_rows, new_rows = was.rows(), now.rows()
    every = {name: (old_rows.get(name, 0), new_rows.get(name, 0)) for name in old_rows | new_rows}
    rows = {
        name: both
        for name, both in every.items()
        if not name.startswith(("compute on", "exposed on"))
    }
    figure, (axes,) = panels(9.6, 1 + 0.34 * len(rows))
    for y, (name, (old, new)) in enumerate(rows.items()):
        most, same = max(old, new) or 1, number(old) == number(new)
        for side, value, color in ((-0.2, old, GREY), (0.2, new, BLUE)):
            axes.barh(y + side, value / most, 0.36, color=color, alpha=0.35 if same else 1)
        axes.text(1.02, y, number(new) if same else f"{number(old)} → {number(new)}", va="center", fontsize=8.5,
                  color=GREY if same else INK)
        if name.startswith("step on"):
            for side, figures in ((-0.2, was), (0.2, now)):
                axes.barh(y + side, figures.exposed_ms / most, 0.36, left=(figures.step_ms - figures.exposed_ms) / most,
                          color="#fbe3d4", edgecolor=RED, hatch="////", linewidth=0)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8.5)
    axes.set(xlim=(0, 1.45), ylim=(len(rows) - 0.4, -0.6), xticks=[])
    axes.spines["bottom"].set_visible(False)
    for label, look in (
        ("before", {"color": GREY}),
        ("after", {"color": BLUE}),
        ("exposed", {"facecolor": "#fbe3d4", "edgecolor": RED, "hatch": "////", "linewidth": 0}),
    ):
        axes.barh([0], [0], label=label, **look)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle(found.title, fontsize=10, color=INK)
    lines = [found.title, f"ran again: {', '.join(found.ran) or 'nothing'}",
             f"kept: {', '.join(found.kept) or 'nothing'}"]
    changed = [
        f"{name}: {number(a)} → {number(b)}"
        for name, (a, b) in every.items()
        if number(a) != number(b)
    ]
    lines += changed or ["no figure changed"]
    return finish(
        figure, "Figures before and after a change. " + "; ".join(lines) + ".", "\n".join(lines)
    )


def verdicts_of_both(found: Difference) -> Table:
    """A row for each pass, a column for each check; `before → after` where they differ. Reasons are listed below."""
    every = {**found.before.verdicts, **found.after.verdicts}
    checks = columns(
        v
        for given in (*found.before.verdicts.values(), *found.after.verdicts.values())
        for v in given
    )
    rows = [(name, [_cell(_outcome(found.before, name, check), _outcome(found.after, name, check))
                    for check in checks]) for name in every]
    agree, _ = _cell(found.before.schedule.outcome, found.after.schedule.outcome)
    notes = [f"the ranks' collectives agree: {agree}"]
    for when, side in (("before", found.before), ("after", found.after)):
        notes += [
            line
            for name, each in side.verdicts.items()
            for line in failures(f"{when}, {name}", each)
        ]
    return grid(f"{counted(len(rows), 'pass')}, before and after", checks, rows, notes)


def _outcome(side: Variant, name: str, check: str) -> Outcome | None:
    """The outcome of one check; None where it did not run, or the pass did not."""
    return outcomes(side.verdicts.get(name, ()), [check])[0]


def _cell(old: Outcome | None, new: Outcome | None) -> tuple[str, str]:
    """(text, background) of what both sides found; None for a side that does not run the pass, or the check."""
    if old is None and new is None:
        return "-", ""
    text = str(new) if old == new else f"{old or 'not run'} → {new or 'not run'}"
    return text, FILLS[new] if new is not None else FAINT
