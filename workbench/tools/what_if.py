"""`what_if`: change one thing of a recipe, run again what it affects, see the difference, and go back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workbench.authoring.plans import ParallelPlan
from workbench.checks import collectives
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.partition import ForwardBackward
from workbench.pipeline.build import check_buildable
from workbench.pipeline.route import Progress, StepState, route, upto
from workbench.pipeline.train import deterministic
from workbench.recipe.recipe import Recipe, diff_recipes
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import aligned
from workbench.tools.fingerprint import fingerprint
from workbench.tools.variant import Difference, Figures, Ran, Variant, figures_of, verdicts_of
from workbench.torch_api.garbage import uncollected
from workbench.world.mesh import World

_VARIANTS = 8


@dataclass(frozen=True)
class _Stage:
    """parts: fingerprints of what the stage's result depends on beside the stage before it. key: of all that, back to
    the first stage.
    """

    name: str
    parts: Mapping[str, str]
    key: str
    run: Callable[[StepState], None]


@dataclass
class _Kept:
    """What the stages up to one have made. Its graphs never change: later stages work on a fork."""

    state: StepState
    figures: Figures | None = None


class Study:
    """A recipe on a world, taken as far as its passes go, with the result of every stage kept; see `what_if`.

    now: the current variant. history: every difference so far, reverts included. records, joint and pair: the
    current variant's pass records and graphs, to be read and not to be changed. Nothing here runs a step:
    `build(study.recipe, world)` does.

    Kept in this process's memory, and nowhere else, are the stages of the last 8 variants; the garbage collector waits
    while an answer is made. A result is found again by its content: what
    the stage reads of the recipe, the code of the stage and of what it calls, as it is loaded, the files that options
    name, torch's version and the world.
    """

    def __init__(self, recipe: Recipe, world: World, device: str, progress: Progress) -> None:
        self.world, self.device, self.progress = world, device, progress
        self.history: list[Difference] = []
        self._kept: dict[str, _Kept] = {}
        self._used: list[list[str]] = []
        self._undo: list[Variant] = []
        self._stages: list[_Stage] = []
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
        return self._kept[self._stages[-1].key].state

    @property
    def records(self) -> list[PassRecord]:
        return list(self._last.records)

    @property
    def pair(self) -> ForwardBackward:
        return self._last.forward_backward

    @property
    def joint(self) -> JointGraph:
        """The joint graph as the last joint pass left it, still open."""
        before_partition = self._stages[1 + len(self.recipe.joint_passes)]
        return self._kept[before_partition.key].state.joint_graph

    def change(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        joint_passes: Sequence[Any] | None = None,
        passes: Sequence[Any] | None = None,
        plan: ParallelPlan | None = None,
    ) -> Difference:
        """Answer for the recipe with these changes, starting at the first stage that they affect.

        changes: values by dotted key, as `Recipe.override` takes them. joint_passes, passes: whole lists in the place
        of the recipe's. plan: placements in the place of the model family's own. Without any of them, what has been
        defined anew runs again.

        A change that cannot be made (RecipeError), or a pass that raises (WorkbenchError), leaves the study as it was.
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
        """Go back to the variant before the last change; what is kept does not run again."""
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
        before: _Kept | None = None
        ran: list[Ran] = []
        with deterministic(recipe.training.deterministic):
            for stage in stages:
                if stage.key not in self._kept:
                    self.progress(stage.name)
                    started = time.perf_counter()
                    self._kept[stage.key] = _Kept(_after(stage, before.state if before else None))
                    why = _why(stage, previous.get(stage.name), ran)
                    ran.append(Ran(stage.name, time.perf_counter() - started, why))
                before = self._kept[stage.key]
            assert before is not None
            last = before.state
            before.figures = before.figures or figures_of(last.forward_backward, last.seen, self.device)
            schedule = collectives.exchange(last.pair.graphs)  # every time, so that no rank waits for another
        self._stages = stages
        self._forget([stage.key for stage in stages])
        return Variant(recipe, plan, verdicts_of(last.records), schedule, before.figures), ran

    def _forget(self, keys: list[str]) -> None:
        self._used = [*(used for used in self._used if used != keys), keys][-_VARIANTS:]
        wanted = {key for used in self._used for key in used}
        self._kept = {key: kept for key, kept in self._kept.items() if key in wanted}

    def __repr__(self) -> str:
        rows = [("", "seconds", "verdict", "launches", "saved B", "step ms", "exposed ms")]
        answers = [("as given", self.seconds, self.first), *((d.title, d.seconds, d.after) for d in self.history)]
        for title, seconds, variant in answers:
            f = variant.figures
            rows.append((title, f"{seconds:.2f}", str(variant.outcome), f"{sum(f.launches.values()):,}",
                         f"{f.saved:,}", f"{f.step_ms:,.3f}", f"{f.exposed_ms:,.3f}"))
        return "\n".join([f"Study({self.recipe.name} on {self.world.size} {self.world.kind} ranks, simulated on "
                          f"{self.device})", *aligned(rows, range(1, 7))])


def what_if(recipe: Recipe, world: World, *, device: str = "h100", progress: Progress = lambda _: None) -> Study:
    """Run the recipe's stages on this rank of `world`, up to the last pass, and keep each stage's result.

    `study.change({"passes.NAME.OPTION": value})` then starts at the first stage that the change affects, and says what
    it did to verdicts (level light), collectives, estimated memory and the time simulated on `device`;
    `study.revert()` goes back. On real ranks, each rank makes the same changes. `progress` hears each stage's name
    before it runs. Raises WorkbenchError as `build` does, but for passes without effect: a verdict says so.
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
    """What `stage` makes of what was there before it."""
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
    """The options, and of files that they name what is in them."""
    given = options.model_dump()
    files = {key: Path(value) for key, value in given.items() if isinstance(value, str) and value}
    return given | {f"{key}: file": hashlib.sha256(path.read_bytes()).hexdigest() for key, path in files.items()
                    if _is_file(path)}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a path
        return False

