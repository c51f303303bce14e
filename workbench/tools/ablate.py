"""Which passes, options and orders save time: variants of a recipe, run in turn with it and compared beyond noise.

Imports no torch: each run is its own process.
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
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe, RecipeError, load_recipe
from workbench.recipe.strict_toml import suggestion
from workbench.recipe.wording import aligned, counted
from workbench.tools.matrix import COLUMNS, Entry, gravest, noise, run_matrix

LISTS = ("joint_passes", "passes")


@dataclass(frozen=True)
class Row:
    """One variant. steps: the median step in milliseconds of each run that did not fail. problem: why others failed.

    saved: bytes saved from forward to backward on rank 0. collectives: of one step, on rank 0. verdicts: the worst.
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
        """Milliseconds: half the range from the fastest run to the slowest."""
        return noise(self.steps)


@dataclass(frozen=True)
class Ablation:
    """The recipe itself, then its variants."""

    recipe: str
    world: str
    repeats: int
    rows: tuple[Row, ...]

    def compared(self, row: Row) -> str:
        """How much longer a step takes than the recipe's; "within noise" if their noise bands overlap."""
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
        """A sentence for each variant with a failed run."""
        return [f"{row.name} did not run: {row.problem}" if not row.steps else
                f"{row.name}: {self.repeats - len(row.steps)} of {self.repeats} runs failed: {row.problem}"
                for row in self.rows if len(row.steps) < self.repeats]

    def __repr__(self) -> str:
        heads = ("variant", "step ms", "against the recipe", "saved bytes", "collectives", "verdicts")
        cells = [heads, *((r.name, f"{r.step:,.1f}" + (f" ±{r.band:,.1f}" if len(r.steps) > 1 else ""),
                           self.compared(r), f"{r.saved:,}", f"{r.collectives}", r.verdicts)
                          for r in self.rows if r.steps)]
        head = f"{self.recipe} on {self.world}, {counted(self.repeats, 'run')} each"
        return "\n".join([head, *aligned(cells), *self.failures])


def variants(recipe: Recipe, vary: Mapping[str, Sequence[Any]] | None = None) -> dict[str, Recipe | str]:
    """By name: the recipe, the recipe without each pass, with each two neighbouring passes swapped, and with options.

    vary: `PASS.OPTION` to the values to try. A variant that breaks a rule for recipes is replaced by the rule's
    message. A swap ignores the rules on order, since it shows what the order is for.
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
    if recipe.joint_passes and recipe.passes:  # always refused, with the reason, which the reader wants to know
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

    folder: for each variant's recipe and reports; a run whose report is already there is not repeated. timeout: seconds
    for one run. `tell` is called with a line for each run. The runs get the source of the user's own passes and model,
    in a file in the folder. Raises WorkbenchError if that source cannot be copied, or differs from the file's.
    """
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    asked = variants(recipe, vary)
    paths: dict[str, Path] = {}
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    for number, (name, variant) in enumerate(asked.items()):
        if isinstance(variant, Recipe):
            slug = f"{number:02}_{''.join(c if c.isalnum() else '_' for c in name)}"
            paths[name] = folder / "recipes" / f"{slug}.toml"
            write_whole(paths[name], variant.model_copy(update={"name": slug}).to_toml())
    entries = run_matrix(paths.values(), folder, files=_own(recipe, folder / "own_passes.py"), world=world,
                         repeats=repeats, timeout=timeout, tell=tell)
    runs = {name: [e for e in entries if e.name == path.stem] for name, path in paths.items()}
    rows = [_row(name, runs[name]) if name in runs else Row(name, problem=str(variant))
            for name, variant in asked.items()]
    kinds = {f"{e.report['world']['size']} {e.report['world']['kind']} ranks" for e in entries if e.report}
    return Ablation(recipe.name, ", ".join(sorted(kinds)) or world, repeats, tuple(rows))


def _own(recipe: Recipe, path: Path) -> list[Path]:
    if "torch" not in sys.modules:  # then no pass or model is registered
        return []
    from workbench.tools.export.script import own_module

    text = own_module(recipe)
    if text and path.exists() and path.read_text(encoding="utf-8") != text:
        raise WorkbenchError(f"{path} holds another version of your passes, with its runs: use another folder")
    if text:
        write_whole(path, text)
    return [path] if text else []


def _row(name: str, runs: Sequence[Entry]) -> Row:
    reports = [run.report for run in runs if run.report is not None and run.report["median_step_seconds"]]
    problem = next((run.problem for run in runs if run.problem), "it trained nothing")
    if not reports:
        return Row(name, problem=problem)
    collectives = int(COLUMNS["collectives"][0](reports[0]) or 0)
    return Row(name, tuple(report["median_step_seconds"] * 1e3 for report in reports), reports[0]["saved_bytes"],
               collectives, gravest(reports), problem if len(reports) < len(runs) else "")
