"""Pass chips: switch passes off and reorder them; launches, memory, step time and verdicts follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import traitlets

from workbench.checks.record import PassRecord
from workbench.checks.verdicts import FILLS, columns
from workbench.errors import WorkbenchError
from workbench.graph.read.cost import device_spec
from workbench.lab.what_if.study import Study
from workbench.notebook.draw.picture import Table
from workbench.notebook.draw.verdicts import cell, failures, verdicts
from workbench.pipeline.report_text import outcomes
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec
from workbench.recipe.strict_toml import DeclarationError
from workbench_lessons.course.moment import Moment

MOST = 4
Lists = tuple[tuple[str, ...], tuple[str, ...]]


class PassChips(Moment):
    """A recipe's passes as chips. Every list that can be made of them is recorded when the view is made.

    `joint_passes` and `passes`: the names that are on, in order, as a recipe has them. `figures`: collective launches,
    bytes saved, the larger of both peaks, and the step in simulated milliseconds. `message`: why the recipe check
    refuses these lists. study: a `what_if` of the recipe's model on an open world; it gets its own lists back.
    """

    joint_passes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    passes = traitlets.List(traitlets.Unicode()).tag(sync=True)

    def __init__(self, study: Study, recipe: Recipe):
        specs = {spec.name: spec for spec in (*recipe.joint_passes, *recipe.passes)}
        if len(specs) > MOST:
            raise WorkbenchError(f"recipe {recipe.name!r} has {len(specs)} passes: every list of them is recorded, so "
                                 f"give a recipe with at most {MOST}")
        self._recipe, self._specs = recipe, specs
        given = tuple(specs)[: len(recipe.joint_passes)], tuple(specs)[len(recipe.joint_passes):]
        started = study.recipe
        self.runs: dict[Lists, dict[str, Any]] = {}
        for lists in sorted(_lists(tuple(specs))):  # lists that begin alike follow one another: the study caches stages
            refused = self._refused(lists)
            self.runs[lists] = {"refused": refused} if refused else _run(study, self._declared(lists))
            if lists == given:
                self._table = replace(verdicts(study.records), title=_title(recipe))
        study.change(joint_passes=started.joint_passes, passes=started.passes)
        spec = device_spec(study.device)
        super().__init__("chips", _title(recipe), {
            "names": list(specs), "given": given, "fills": {str(outcome): fill for outcome, fill in FILLS.items()},
            "simulated": f"simulated on {spec.name}, {spec.trust}",
            "runs": {_key(lists): run for lists, run in self.runs.items()}},
            joint_passes=list(given[0]), passes=list(given[1]))
        self.add(self.setting("as in the recipe", joint_passes=list(given[0]), passes=list(given[1])))

    def set(self, joint_passes: Sequence[str], passes: Sequence[str]) -> None:
        """Change both lists at once."""
        self.take(joint_passes=list(joint_passes), passes=list(passes))

    def picture(self) -> Table:
        """What a reader sees where no script runs: the verdicts of the recipe's own lists."""
        return self._table

    @traitlets.observe("joint_passes", "passes")
    def _changed(self, _: Any) -> None:
        lists = tuple(self.joint_passes), tuple(self.passes)
        run = self.runs.get(lists) or {"refused": self._refused(lists)}
        self.message, self.figures = "\n".join(run.get("refused", ())), run.get("figures", {})

    def _declared(self, lists: Lists) -> dict[str, list[PassSpec]]:
        return dict(zip(("joint_passes", "passes"), ([self._specs[name] for name in part] for part in lists),
                        strict=True))

    def _refused(self, lists: Lists) -> list[str]:
        """What the recipe check says against these lists."""
        if unknown := [name for part in lists for name in part if name not in self._specs]:
            return [f"{unknown[0]!r} is none of the chips: {', '.join(self._specs)}"]
        try:
            self._recipe.override({key: [spec.as_toml() for spec in specs]
                                   for key, specs in self._declared(lists).items()})
        except DeclarationError as error:
            return [": ".join(filter(None, problem)) for problem in error.problems]
        return []


def _title(recipe: Recipe) -> str:
    return f"the passes of {recipe.name}"


def _lists(names: tuple[str, ...]) -> Iterator[Lists]:
    """Every order of some of the names, cut into joint passes and passes at every place."""
    for count in range(len(names) + 1):
        for order in permutations(names, count):
            for cut in range(count + 1):
                yield order[:cut], order[cut:]


def _key(lists: Lists) -> str:
    return "|".join(map(" ".join, lists))


def _run(study: Study, lists: Mapping[str, Sequence[PassSpec]]) -> dict[str, Any]:
    now = study.change(joint_passes=lists["joint_passes"], passes=lists["passes"]).after.figures
    return {"figures": {"launches": sum(now.launches.values()), "bytes saved": now.saved,
                        "peak bytes": max(now.peaks.values()), "step ms": round(now.step_ms, 2)},
            **_found(study.records)}


def _found(records: Sequence[PassRecord]) -> dict[str, Any]:
    """The cells of the verdicts' table, and a line for each that is no PASS."""
    found = {record.name: record.verdicts for record in records}
    checks = columns(v for verdicts in found.values() for v in verdicts)
    return {"checks": checks,
            "verdicts": {name: [cell(outcome) for outcome in outcomes(verdicts, checks)]
                         for name, verdicts in found.items()},
            "notes": [line for name, verdicts in found.items() for line in failures(name, verdicts)]}
