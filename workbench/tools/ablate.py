"""Which passes, options and orders pay: variants of a recipe run beside it, and what of the difference is noise.

No torch here: each run is a process of its own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipe.contracts import CONTRACTS
from workbench.recipe.recipe import Recipe, RecipeError, load_recipe
from workbench.recipe.strict_toml import suggestion
from workbench.recipe.wording import counted
from workbench.tools.matrix import COLUMNS, Entry, gravest, noise, run_matrix

LISTS = ("joint_passes", "passes")


@dataclass(frozen=True)
class Row:
    """One variant. steps: the median step of each run, in milliseconds, but for those that failed: `problem` says why.

    saved: bytes from forward to backward, collectives: of a step, on rank 0. verdicts: the gravest of all passes.
    """

    name: str
    steps: tuple[float, ...] = ()
    saved: int = 0
    collectives: int = 0
    verdicts: str = ""
    problem: str = ""

    @property
    def step(self) -> float:
        """Milliseconds: the median over the runs."""
        return statistics.median(self.steps)

    @property
    def band(self) -> float:
        """Milliseconds: half the distance from the fastest run to the slowest."""
        return noise(self.steps)


@dataclass(frozen=True)
class Ablation:
    """Variants of one recipe, itself first."""

    recipe: str
    world: str
    repeats: int
    rows: tuple[Row, ...]

    def compared(self, row: Row) -> str:
        """How much longer a step takes than the recipe's own; within noise where the bands of the two overlap."""
        base = self.rows[0]
        if not row.steps or not base.steps or row is base:
            return ""
        apart = row.step - base.step
        counts = {len(row.steps), len(base.steps)}
        if 1 in counts:
            return f"{apart:+,.1f} ms, noise unknown: one run of {'each' if counts == {1} else 'one'}"
        return f"{apart:+,.1f} ms" if abs(apart) > row.band + base.band else "within noise"

    @property
    def failures(self) -> list[str]:
        """One sentence for each variant of which not all runs came to their end."""
        return [f"{row.name} did not run: {row.problem}" if not row.steps else
                f"{row.name}: {self.repeats - len(row.steps)} of {self.repeats} runs failed: {row.problem}"
                for row in self.rows if len(row.steps) < self.repeats]

    def __repr__(self) -> str:
        heads = ("variant", "step ms", "against the recipe", "saved bytes", "collectives", "verdicts")
        cells = [heads, *((r.name, f"{r.step:,.1f}" + (f" ±{r.band:,.1f}" if len(r.steps) > 1 else ""),
                           self.compared(r), f"{r.saved:,}", f"{r.collectives}", r.verdicts)
                          for r in self.rows if r.steps)]
        wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in cells]
        head = f"{self.recipe} on {self.world}, {counted(self.repeats, 'run')} each"
        return "\n".join([head, *lines, *self.failures])


def variants(recipe: Recipe, vary: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Recipe | str]:
    """By name: the recipe, without each of its passes, with each two neighbours of a list swapped, and with options.

    vary: `PASS.OPTION` to the values to try. Where a rule keeps a variant from being a recipe, its sentence stands in
    its place. A swap does away with rules of order: what the order is for is what it shows.
    """
    found: dict[str, Recipe | str] = {recipe.name: recipe}
    for where in LISTS:
        listed = list(getattr(recipe, where))
        for i, spec in enumerate(listed):
            found[f"without {spec.name}"] = _changed(recipe, {
                where: _lists(listed[:i] + listed[i + 1:]),
                "expect.no_effect": [name for name in recipe.expect.no_effect if name != spec.name]})
        for i, (first, second) in enumerate(pairwise(listed)):
            swapped = _lists([*listed[:i], second, first, *listed[i + 2:]])
            found[f"{second.name} before {first.name}"] = _changed(recipe, {where: swapped, "free_order": True})
    if recipe.joint_passes and recipe.passes:  # refused, with the reason, which is what a reader wants to know
        last, first = recipe.joint_passes[-1], recipe.passes[0]
        found[f"{first.name} before {last.name}"] = _changed(recipe, {
            "joint_passes": _lists([*recipe.joint_passes[:-1], first, last]), "passes": _lists(recipe.passes[1:])})
    for key, values in (vary or {}).items():
        name, _, option = key.partition(".")
        where = next((w for w in LISTS if name in [spec.name for spec in getattr(recipe, w)]), "")
        if not recipe.pass_names:
            raise WorkbenchError(f"vary {key!r}: recipe {recipe.name!r} has no passes")
        if not where or not option:
            raise WorkbenchError(f"vary {key!r}: name a pass of recipe {recipe.name!r} and its option, such as "
                                 f"{recipe.pass_names[0]}.OPTION")
        known = CONTRACTS[name].options.model_fields
        if option.partition(".")[0] not in known:
            raise WorkbenchError(f"vary {key!r}: pass {name!r} has no such option" + suggestion(option, known))
        for value in values:
            found[f"{key} = {value}"] = _changed(recipe, {f"{where}.{key}": value})
    return found


def _lists(specs: Sequence[Any]) -> list[Any]:
    return [spec.as_toml() for spec in specs]


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe | str:
    try:
        return recipe.override({"strict": False, **changes})
    except RecipeError as error:
        return "; ".join(problem.message for problem in error.problems)


def ablate(
    recipe: Recipe | str,
    folder: Path,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    world: str = "auto",
    repeats: int = 3,
    timeout: float = 300.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Ablation:
    """Run the variants of `recipe` in turn, `repeats` times each, and compare them with it.

    folder: keeps each variant's recipe and reports; what has its report there is not run again. timeout: seconds of
    one run. `tell` hears a line for each run. The user's own passes and model go to the runs as their source, in a file
    of the folder. Raises WorkbenchError for one whose source cannot be taken along, or differs from that of the file.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    asked = variants(recipe, vary)
    paths: dict[str, Path] = {}
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    for number, (name, variant) in enumerate(asked.items()):
        if isinstance(variant, Recipe):
            slug = f"{number:02}_{''.join(c if c.isalnum() else '_' for c in name)}"
            paths[name] = folder / "recipes" / f"{slug}.toml"
            paths[name].write_text(variant.model_copy(update={"name": slug}).to_toml(), encoding="utf-8")
    entries = run_matrix(paths.values(), folder, files=_own(recipe, folder / "own_passes.py"), world=world,
                         repeats=repeats, timeout=timeout, tell=tell)
    runs = {name: [e for e in entries if e.name == path.stem] for name, path in paths.items()}
    rows = [_row(name, runs[name]) if name in runs else Row(name, problem=str(variant))
            for name, variant in asked.items()]
    kinds = {f"{e.report['world']['size']} {e.report['world']['kind']} ranks" for e in entries if e.report}
    return Ablation(recipe.name, ", ".join(sorted(kinds)) or world, repeats, tuple(rows))


def _own(recipe: Recipe, path: Path) -> list[Path]:
    if "torch" not in sys.modules:  # then nobody has registered a pass or a model
        return []
    from workbench.tools.export_script import own_module

    text = own_module(recipe)
    if text and path.exists() and path.read_text(encoding="utf-8") != text:
        raise WorkbenchError(f"{path} holds other code of your passes, and its folder their runs: take another folder")
    if text:
        path.write_text(text, encoding="utf-8")
    return [path] if text else []


def _row(name: str, runs: Sequence[Entry]) -> Row:
    reports = [run.report for run in runs if run.report is not None and run.report["median_step_seconds"]]
    problem = next((run.problem for run in runs if run.problem), "it trained nothing")
    if not reports:
        return Row(name, problem=problem)
    collectives = int(COLUMNS["collectives"][0](reports[0]) or 0)
    return Row(name, tuple(report["median_step_seconds"] * 1e3 for report in reports), reports[0]["saved_bytes"],
               collectives, gravest(reports), problem if len(reports) < len(runs) else "")
