"""`what_if`: change one thing in a recipe, run again only the stages that it affects, and see the difference."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import isfile  # False for a text that is too long to be a path
from pathlib import Path
from typing import Any, TypeVar

import torch

from workbench.authoring.author import author, author_module, random_tokens
from workbench.authoring.families import find_family
from workbench.authoring.plans import ParallelPlan
from workbench.checks import collectives
from workbench.checks.record import PassRecord
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, capture
from workbench.graph.partition import ForwardBackward, Split, partition
from workbench.graph.read.cost import device_spec
from workbench.passes.registry import find_pass
from workbench.pipeline.build import check_buildable
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import capture_decompositions, choose, run_joint, run_partitioned
from workbench.pipeline.stages import LATE, PairStep, capture_joint, passes_before, step_kind
from workbench.pipeline.train import deterministic
from workbench.recipe.contracts import Stage
from workbench.recipe.hooks import hook_of
from workbench.recipe.recipe import Recipe, diff_recipes
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import aligned
from workbench.tools.fingerprint import Sources, fingerprint
from workbench.tools.variant import Difference, Figures, Ran, Variant, figures_of, verdicts_of
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor import lowering
from workbench.world.mesh import World

T = TypeVar("T")
_LATER: dict[str, Any] = {
    **dict.fromkeys(
        ("name", "about", "capture", "strict", "free_order", "expect", "joint_passes", "passes"),
        True,
    ),
    "training": {"steps", "step", "nan_norm", "read_loss_every", "optimizer", "lr", "clip"},
    "data": {"path"},
}
"""What neither the model nor its graph depends on; any other change of a recipe needs a new model."""
_VARIANTS = 8


@dataclass(frozen=True)
class _Stage:
    """One call that an answer asked for. parts: fingerprints of what the call itself reads, by name. key: one
    fingerprint of these and of all calls before it.
    """

    name: str
    parts: Mapping[str, str]
    key: str


class Study:
    """A recipe on a world, up to its last pass, with a cache of each stage's result; see `what_if`.

    now: the current variant. history: every difference so far, reverts included. records, joint and pair: the
    current variant's pass records and graphs, for reading only. Nothing here runs a step: `build(study.recipe, world)`
    does.

    The cache holds the stages of the last 8 variants, in the memory of this process. A result is reused where its
    inputs are the same: what the stage reads of the recipe, the code of a pass or model that was defined in a notebook,
    the files that options name, torch's version and the world. Where a file of your own modules was edited, all stages
    run again. The garbage collector is paused during an answer.
    """

    def __init__(self, recipe: Recipe, world: World, device: str, progress: Progress) -> None:
        self.world, self.device, self.progress = world, device, progress
        self.history: list[Difference] = []
        self._kept: dict[str, Any] = {}  # results, which never change: later calls work on a fork
        self._figures: dict[str, Figures] = {}
        self._used: list[list[str]] = []
        self._undo: list[Variant] = []
        self._stages: list[_Stage] = []
        self._sources = Sources()
        started = time.perf_counter()
        with uncollected():
            self.now, self.ran = self._answer(recipe, None)
        self.seconds = time.perf_counter() - started
        self.first = self.now

    @property
    def recipe(self) -> Recipe:
        return self.now.recipe

    @property
    def _split(self) -> Split:
        split: Split = self._kept[self._stages[-1].key]
        return split

    @property
    def records(self) -> list[PassRecord]:
        return list(self._split.known.records)

    @property
    def pair(self) -> ForwardBackward:
        return self._split.pair

    @property
    def joint(self) -> JointGraph:
        """The joint graph after the last joint pass, still open."""
        joint: JointGraph = self._kept[self._stages[1 + len(self.recipe.joint_passes)].key]
        return joint

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
        wanted = dict(changes or {})
        for key, value in (("joint_passes", joint_passes), ("passes", passes)):
            if value is not None:
                wanted[key] = [
                    spec.as_toml() if isinstance(spec, PassSpec) else spec
                    for spec in listed(value, key)
                ]
        before = self.now
        recipe = self.recipe.override(wanted) if wanted else self.recipe
        difference = self._to(recipe, before.plan if plan is None else plan)
        self._undo.append(before)
        return difference

    def revert(self) -> Difference:
        """Go back to the variant before the last change; stages in the cache do not run again."""
        if not self._undo:
            raise WorkbenchError("nothing to revert: no change was made since the start")
        before = self._undo[-1]
        self.history[-1:] = [replace(self._to(before.recipe, before.plan), reverted=True)]
        self._undo.pop()
        return self.history[-1]

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
        self.history.append(
            Difference(changes, before, after, ran, kept, time.perf_counter() - started)
        )
        return self.history[-1]

    def _answer(self, recipe: Recipe, plan: ParallelPlan | None) -> tuple[Variant, list[Ran]]:
        check_buildable(recipe, self.world.kind)
        with deterministic(recipe.training.deterministic), telling(self.progress) as tell:
            calls = _Calls(self._kept, self.world, self._sources.look(), self._stages, tell)
            split = _graphs(recipe, self.world, plan, calls)
            if calls.key not in self._figures:
                compiled = split.known.has_pass_of(Stage.LOWERING)
                self._figures[calls.key] = figures_of(split.pair, self.device, compiled=compiled)
            # every time, so that no rank waits for another
            schedule = collectives.exchange(split.graphs)
        self._stages = calls.stages
        self._forget([stage.key for stage in calls.stages])
        return Variant(
            recipe, plan, verdicts_of(split.known.records), schedule, self._figures[calls.key]
        ), calls.ran

    def _forget(self, keys: list[str]) -> None:
        self._used = [*(used for used in self._used if used != keys), keys][-_VARIANTS:]
        wanted = {key for used in self._used for key in used}
        self._kept = {key: state for key, state in self._kept.items() if key in wanted}
        self._figures = {key: figures for key, figures in self._figures.items() if key in wanted}

    def __repr__(self) -> str:
        rows = [("", "seconds", "verdict", "launches", "saved B", "step ms", "exposed ms")]
        answers = [
            ("as given", self.seconds, self.first),
            *((d.title, d.seconds, d.after) for d in self.history),
        ]
        for title, seconds, variant in answers:
            f = variant.figures
            rows.append((title, f"{seconds:.2f}", str(variant.outcome), f"{sum(f.launches.values()):,}",
                         f"{f.saved:,}", f"{f.step_ms:,.3f}", f"{f.exposed_ms:,.3f}"))
        return "\n".join(
            [
                f"Study({self.recipe.name} on {self.world.size} {self.world.kind} ranks, simulated on "
                f"{self.device}, {device_spec(self.device).trust})",
                *aligned(rows, range(1, 7)),
            ]
        )


def what_if(
    recipe: Recipe, world: World, *, device: str = "h100", progress: Progress = True
) -> Study:
    """Run the recipe's stages on this rank of `world`, up to the last pass, and cache each stage's result.

    `study.change({"passes.NAME.OPTION": value})` then runs again from the first stage that the change affects, and
    returns the difference in verdicts (level light), collectives, estimated memory and the time simulated on `device`;
    `study.revert()` goes back. On real ranks, each rank makes the same changes. progress: as for `run`.

    Raises WorkbenchError as `build` does, except for passes without effect, which get a verdict.
    """
    return Study(recipe, world, device, progress)


class _Calls:
    """The calls of one answer: each is made once for what it reads, and for the calls before it."""

    def __init__(self, kept: dict[str, Any], world: World, edits: int, previous: Sequence[_Stage],
                 tell: Callable[[str], Any]):
        self.kept, self.tell = kept, tell
        self.previous = {stage.name: stage for stage in previous}
        self.stages: list[_Stage] = []
        self.ran: list[Ran] = []
        self.key = fingerprint(
            edits, torch.__version__, world.kind, world.size, world.rank, str(world.device)
        )

    def __call__(
        self, name: str, function: Callable[..., T], *args: Any, reads: Mapping[str, Any]
    ) -> T:
        """`function(*args)`, from memory where `reads` and all calls before this one are as they were.

        reads: code and plans as objects, recipe and options as text, since equal texts may be pickled in two ways.
        """
        parts = {part: fingerprint(value) for part, value in reads.items()}
        self.key = fingerprint(self.key, name, parts)
        stage = _Stage(name, parts, self.key)
        if self.key not in self.kept:
            self.tell(name)
            started = time.perf_counter()
            self.kept[self.key] = function(*args)
            why = _why(stage, self.previous.get(name), self.ran)
            self.ran.append(Ran(name, time.perf_counter() - started, why))
        self.stages.append(stage)
        found: T = self.kept[self.key]
        return found


def _graphs(recipe: Recipe, world: World, plan: ParallelPlan | None, call: _Calls) -> Split:
    """The calls of `build`, up to its last pass. No call changes what another returned."""
    table, step = capture_decompositions(recipe.joint_passes) is not None, recipe.training.step
    code: Any = author_module, random_tokens, find_family(recipe.model.family)
    authored = call("author", partial(author, plan=plan), recipe, world, reads={
        "recipe": repr(recipe.model_dump(exclude=_LATER)), "plan": plan, "code": code})
    joint = call("capture", capture_joint, recipe, authored, reads={
        "recipe": repr((table, step, recipe.capture)),
        "code": (capture, hook_of("capture", recipe.capture), lowering.decomposition_table)})
    for spec in recipe.joint_passes:
        joint = call(spec.name, _after_joint, joint, spec, reads=_reads(spec))
    tags = [find_pass(spec.name).partition_effect for spec in recipe.joint_passes]
    split: Split = call("partition", _divided, joint, reads={"code": (partition, joint.cut, tags)})
    early = passes_before(recipe.passes, LATE)
    for spec in early:
        split = call(spec.name, _after_split, split, spec, reads=_reads(spec))
    if step != "pair":
        kind = step_kind(recipe)
        split = call("join", _joined, kind, recipe, split, reads={
            "recipe": repr((recipe.training.model_dump(), table)), "code": type(kind)})
    for spec in recipe.passes[len(early):]:
        split = call(spec.name, _after_split, split, spec, reads=_reads(spec))
    return split


def _reads(spec: PassSpec) -> dict[str, Any]:
    item = find_pass(spec.name)
    options = choose(spec, tuple(Stage), "what_if")[1]
    proofs = item.effect, item.partition_effect, item.order_costs, item.promised, item.executed
    return {"options": repr(_read(options)), "code": (item.function, item.contract, proofs)}


def _after_joint(joint: JointGraph, spec: PassSpec) -> JointGraph:
    other = joint.fork()
    run_joint(other, [spec])
    return other


def _divided(joint: JointGraph) -> Split:
    return partition(joint.fork())


def _after_split(split: Split, spec: PassSpec) -> Split:
    other = split.fork()
    run_partitioned(other, [spec])
    return other


def _joined(kind: PairStep, recipe: Recipe, split: Split) -> Split:
    return kind.join(recipe, split.pair.fork())


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
    values: dict[str, Any] = options.model_dump()
    for key, value in list(values.items()):
        if isinstance(value, str) and isfile(value):
            values[f"{key}: file"] = hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return values

