"""`what_if`: change one thing in a recipe, run again only the stages that it affects, and see the difference."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import isfile  # False for a text that is too long to be a path
from pathlib import Path
from typing import Any

import torch

from workbench.authoring.plans import ParallelPlan
from workbench.checks import collectives
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward
from workbench.graph.read.cost import device_spec
from workbench.pipeline.build import check_buildable
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.route import StepState, route, upto
from workbench.pipeline.train import deterministic
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe, diff_recipes
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import aligned
from workbench.tools.fingerprint import fingerprint
from workbench.tools.variant import Difference, Figures, Ran, Variant, figures_of, verdicts_of
from workbench.torch_api.garbage import uncollected
from workbench.world.mesh import World

_VARIANTS = 8
_GARBAGE = 48
"""Forgotten stage results after which the garbage collector runs: it is paused in answers, and graphs are cycles."""


@dataclass(frozen=True)
class _Stage:
    """parts: fingerprints of what the stage itself reads, by name. key: one fingerprint of these and of all stages
    before it.
    """

    name: str
    parts: Mapping[str, str]
    key: str
    run: Callable[[StepState], None]


class Study:
    """A recipe on a world, up to its last pass, with a cache of each stage's result; see `what_if`.

    now: the current variant. history: every difference so far, reverts included. records, joint and pair: the
    current variant's pass records and graphs, for reading only. Nothing here runs a step: `build(study.recipe, world)`
    does.

    The cache holds the stages of the last 8 variants, in the memory of this process. A result is reused where its
    inputs are the same: what the stage reads of the recipe, the code of the stage and of what it calls, as loaded, the
    files that options name, torch's version and the world. The garbage collector is paused during an answer.
    """

    def __init__(self, recipe: Recipe, world: World, device: str, progress: Progress) -> None:
        self.world, self.device, self.progress = world, device, progress
        self.history: list[Difference] = []
        self._kept: dict[str, StepState] = {}  # these never change: later stages work on a fork
        self._figures: dict[str, Figures] = {}
        self._used: list[list[str]] = []
        self._undo: list[Variant] = []
        self._stages: list[_Stage] = []
        self._garbage = 0
        started = time.perf_counter()
        with uncollected():
            self.now, self.ran = self._answer(recipe, None)
        self.seconds = time.perf_counter() - started
        self.first = self.now

    @property
    def recipe(self) -> Recipe:
        return self.now.recipe

    @property
    def _last(self) -> StepState:
        return self._kept[self._stages[-1].key]

    @property
    def records(self) -> list[PassRecord]:
        return list(self._last.records)

    @property
    def pair(self) -> ForwardBackward:
        return self._last.forward_backward

    @property
    def joint(self) -> JointGraph:
        """The joint graph after the last joint pass, still open."""
        before_partition = self._stages[1 + len(self.recipe.joint_passes)]
        return self._kept[before_partition.key].joint_graph

    def change(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        joint_passes: Sequence[Any] | None = None,
        passes: Sequence[Any] | None = None,
        plan: ParallelPlan | None = None,
    ) -> Difference:
        """Change the recipe, and run again from the first stage that the changes affect.

        changes: values by dotted key, as `Recipe.override` takes them. joint_passes, passes: lists that replace the
        recipe's. plan: placements that replace the model family's own. Without arguments, the stages whose code was
        redefined run again.

        A change that cannot be made (RecipeError), or a pass that raises (WorkbenchError), leaves the study unchanged.
        """
        lists = {"joint_passes": joint_passes, "passes": passes}
        given = {key: [spec.as_toml() if isinstance(spec, PassSpec) else spec for spec in listed(value, key)]
                 for key, value in lists.items() if value is not None}
        wanted = {**(changes or {}), **given}
        recipe = self.recipe.override(wanted) if wanted else self.recipe
        before = self.now
        found = self._to(recipe, self.now.plan if plan is None else plan)
        self._undo.append(before)
        return found

    def revert(self) -> Difference:
        """Go back to the variant before the last change; stages in the cache do not run again."""
        if not self._undo:
            raise WorkbenchError("nothing to revert: no change was made since the start")
        wanted = self._undo[-1]
        found = replace(self._to(wanted.recipe, wanted.plan), reverted=True)
        self._undo.pop()
        self.history[-1] = found
        return found

    @uncollected()
    def _to(self, recipe: Recipe, plan: ParallelPlan | None) -> Difference:
        started, before = time.perf_counter(), self.now
        after, ran = self._answer(recipe, plan)
        changes: list[tuple[str, Any, Any]] = diff_recipes(before.recipe, recipe)
        if plan != before.plan:
            was, now = ("the family's" if p is None else "given" for p in (before.plan, plan))
            changes.append(("plan", was, now))
        kept = [stage.name for stage in self._stages if stage.name not in {r.stage for r in ran}]
        self.now = after
        self.history.append(Difference(changes, before, after, ran, kept, time.perf_counter() - started))
        return self.history[-1]

    def _answer(self, recipe: Recipe, plan: ParallelPlan | None) -> tuple[Variant, list[Ran]]:
        check_buildable(recipe, self.world.kind)
        stages = list(_stages(recipe, self.world, plan))
        previous = {stage.name: stage for stage in self._stages}
        state: StepState | None = None
        ran: list[Ran] = []
        with deterministic(recipe.training.deterministic), telling(self.progress) as tell:
            for stage in stages:
                if stage.key not in self._kept:
                    tell(stage.name)
                    started = time.perf_counter()
                    self._kept[stage.key] = _after(stage, state)
                    why = _why(stage, previous.get(stage.name), ran)
                    ran.append(Ran(stage.name, time.perf_counter() - started, why))
                state, last = self._kept[stage.key], stage.key
            assert state is not None
            if last not in self._figures:
                self._figures[last] = figures_of(state.forward_backward, state.seen, self.device,
                                                 compiled=any(r.stage is Stage.LOWERING for r in state.records))
            schedule = collectives.exchange(state.graphs)  # every time, so that no rank waits for another
        self._stages = stages
        self._forget([stage.key for stage in stages])
        return Variant(recipe, plan, verdicts_of(state.records), schedule, self._figures[last]), ran

    def _forget(self, keys: list[str]) -> None:
        self._used = [*(used for used in self._used if used != keys), keys][-_VARIANTS:]
        wanted = {key for used in self._used for key in used}
        forgotten = self._kept.keys() - wanted
        self._kept = {key: state for key, state in self._kept.items() if key in wanted}
        self._figures = {key: figures for key, figures in self._figures.items() if key in wanted}
        self._garbage += len(forgotten)
        if self._garbage >= _GARBAGE:
            gc.collect()
            self._garbage = 0

    def __repr__(self) -> str:
        rows = [("", "seconds", "verdict", "launches", "saved B", "step ms", "exposed ms")]
        answers = [("as given", self.seconds, self.first), *((d.title, d.seconds, d.after) for d in self.history)]
        for title, seconds, variant in answers:
            f = variant.figures
            rows.append((title, f"{seconds:.2f}", str(variant.outcome), f"{sum(f.launches.values()):,}",
                         f"{f.saved:,}", f"{f.step_ms:,.3f}", f"{f.exposed_ms:,.3f}"))
        return "\n".join([f"Study({self.recipe.name} on {self.world.size} {self.world.kind} ranks, simulated on "
                          f"{self.device}, {device_spec(self.device).trust})", *aligned(rows, range(1, 7))])


def what_if(recipe: Recipe, world: World, *, device: str = "h100", progress: Progress = True) -> Study:
    """Run the recipe's stages on this rank of `world`, up to the last pass, and cache each stage's result.

    `study.change({"passes.NAME.OPTION": value})` then runs again from the first stage that the change affects, and
    returns the difference in verdicts (level light), collectives, estimated memory and the time simulated on `device`;
    `study.revert()` goes back. On real ranks, each rank makes the same changes. progress: as for `run`.

    Raises WorkbenchError as `build` does, except for passes without effect, which get a verdict.
    """
    return Study(recipe, world, device, progress)


def _stages(recipe: Recipe, world: World, plan: ParallelPlan | None) -> Iterator[_Stage]:
    key = fingerprint(torch.__version__, world.kind, world.size, world.rank, str(world.device))
    stages = route(recipe, world, plan=plan)
    for stage in stages[: upto(stages, "lower")]:
        parts = {part: fingerprint(_read(value) if part == "options" else value)
                 for part, value in stage.reads.items()}
        key = fingerprint(key, stage.name, parts)
        yield _Stage(stage.name, parts, key, stage.run)


def _after(stage: _Stage, before: StepState | None) -> StepState:
    """The state after `stage`; `before` keeps its own."""
    state = before.fork() if before else StepState()
    stage.run(state)
    if before:
        before.forget_old_graphs()  # the checks have read graphs of both
    return state


def _why(stage: _Stage, previous: _Stage | None, ran: Sequence[Ran]) -> str:
    if previous is None:
        return "new"
    differ = [part for part, value in stage.parts.items() if previous.parts.get(part) != value]
    if differ:
        return " and ".join(differ)
    if ran:
        return f"after {ran[0].stage}"
    return "no longer kept" if stage.key == previous.key else "after other stages than before"


def _read(options: Any) -> dict[str, Any]:
    """The options, and a hash of each file that they name."""
    given = options.model_dump()
    files = {key: value for key, value in given.items() if isinstance(value, str) and isfile(value)}
    return given | {f"{key}: file": hashlib.sha256(Path(path).read_bytes()).hexdigest() for key, path in files.items()}

