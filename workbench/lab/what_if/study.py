"""`what_if`: change one thing in a recipe, run again only the stages that it affects, and see the difference."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import isfile  # False for a text that is too long to be a path
from pathlib import Path
from typing import Any, TypeVar

import torch

from workbench.authoring.author import author, author_module, random_tokens
from workbench.authoring.families import find_family
from workbench.checks.agreement import exchange
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, capture
from workbench.graph.partition import ForwardBackward, Split, partition
from workbench.graph.read.cost import device_spec
from workbench.lab.what_if.fingerprint import Sources, fingerprint
from workbench.lab.what_if.variant import Difference, Variant, figures_of
from workbench.passes.registry import find_pass
from workbench.pipeline.build import check_buildable
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import capture_decompositions, choose, run_joint, run_partitioned
from workbench.pipeline.stages import LATE, capture_joint, passes_before, step_kind
from workbench.recipe.contracts import Stage
from workbench.recipe.hooks import hook_of
from workbench.recipe.recipe import Recipe, diff_recipes, load_recipe
from workbench.recipe.sections import PassSpec, listed
from workbench.recipe.wording import aligned
from workbench.tools.command_end import FAILED, PASSED
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor import lowering
from workbench.world.fake import fake_world
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
_MOST_KEPT = 80
"""Results in the cache: those of about 8 variants of 10 stages."""


class Study:
    """A recipe on a world, up to its last pass, with a cache of each stage's result; see `what_if`.

    now: the current variant. history: every difference so far, reverts included. records, joint and pair: the
    current variant's pass records and graphs, for reading only; joint is the joint graph after the last joint pass.
    Nothing here runs a step: `build(study.recipe, world)` does.

    The cache is in the memory of this process. A result is reused where its inputs are the same: what the stage reads
    of the recipe, the code of a pass or model that was defined in a notebook, the files that options name, torch's
    version and the world. Where a file of your own modules was edited, all stages run again. The garbage collector is
    paused during an answer.
    """

    joint: JointGraph
    pair: ForwardBackward
    records: list[PassRecord]

    def __init__(self, recipe: Recipe, world: World, device: str, progress: Progress) -> None:
        self.world, self.device, self.progress = world, device, progress
        self.history: list[Difference] = []
        self._results: OrderedDict[str, Any] = (
            OrderedDict()
        )  # which never change: later calls work on a fork
        self._undo: list[Variant] = []
        self._sources = Sources()
        started = time.perf_counter()
        self.now, calls = self._answer(recipe)
        self.first, self.ran, self.seconds = self.now, calls.ran, time.perf_counter() - started

    @property
    def recipe(self) -> Recipe:
        return self.now.recipe

    def change(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        joint_passes: Sequence[Any] | None = None,
        passes: Sequence[Any] | None = None,
    ) -> Difference:
        """Change the recipe, and run again from the first stage that the changes affect.

        changes: values by dotted key, as `Recipe.override` takes them. joint_passes, passes: lists that replace the
        recipe's. Without arguments, the stages whose code was redefined run again.

        A change that cannot be made (RecipeError), or a pass that raises (WorkbenchError), leaves the study unchanged.
        """
        wanted = dict(changes or {})
        for key, specs in (("joint_passes", joint_passes), ("passes", passes)):
            if specs is not None:
                wanted[key] = [
                    spec.as_toml() if isinstance(spec, PassSpec) else spec
                    for spec in listed(specs, key)
                ]
        before = self.now
        recipe = self.recipe.override(wanted) if wanted else self.recipe
        difference = self._to(recipe)
        self._undo.append(before)
        return difference

    def revert(self) -> Difference:
        """Go back to the variant before the last change; stages in the cache do not run again."""
        if not self._undo:
            raise WorkbenchError("nothing to revert: no change was made since the start")
        before = self._undo[-1]
        self.history[-1:] = [replace(self._to(before.recipe), reverted=True)]
        self._undo.pop()
        return self.history[-1]

    def _to(self, recipe: Recipe) -> Difference:
        started, before = time.perf_counter(), self.now
        self.now, calls = self._answer(recipe)
        changes: list[tuple[str, Any, Any]] = diff_recipes(before.recipe, recipe)
        kept = [name for name in calls.names if name not in calls.ran]
        seconds = time.perf_counter() - started
        self.history.append(Difference(changes, before, self.now, calls.ran, kept, seconds))
        return self.history[-1]

    @uncollected()
    def _answer(self, recipe: Recipe) -> tuple[Variant, _Calls]:
        check_buildable(recipe, self.world.kind)
        world = self.world
        with deterministic(recipe.training.deterministic), telling(self.progress) as tell:
            calls = _Calls(
                self._results,
                tell,
                self._sources.look(),
                torch.__version__,
                world.kind,
                world.size,
                world.rank,
                str(world.device),
            )
            joint, split = _graphs(recipe, world, calls)
            figures_key = fingerprint(calls.key, "figures")
            if figures_key not in self._results:
                compiled = split.known.has_pass_of(Stage.LOWERING)
                self._results[figures_key] = figures_of(split.pair, self.device, compiled=compiled)
            self._results.move_to_end(figures_key)
            # every time, so that no rank waits for another
            schedule = exchange(split.graphs)
        self.joint, self.pair, self.records = joint, split.pair, list(split.known.records)
        verdicts = {record.name: tuple(record.verdicts) for record in self.records}
        variant = Variant(recipe, verdicts, schedule, self._results[figures_key])
        while len(self._results) > _MOST_KEPT:
            self._results.popitem(last=False)
        return variant, calls

    def pictured(self) -> Any:
        """What `show` draws: the passes of the current variant, or its joint graph."""
        return self.records or self.joint.graph

    def __repr__(self) -> str:
        rows = [("", "seconds", "verdict", "launches", "saved B", "step ms", "exposed ms")]
        answers = [
            ("as given", self.seconds, self.first),
            *((d.title, d.seconds, d.after) for d in self.history),
        ]
        for title, seconds, variant in answers:
            f = variant.figures
            rows.append(
                (
                    title,
                    f"{seconds:.2f}",
                    str(variant.outcome),
                    f"{sum(f.launches.values()):,}",
                    f"{f.saved:,}",
                    f"{f.step_ms:,.3f}",
                    f"{f.exposed_ms:,.3f}",
                )
            )
        where = f"{self.recipe.name} on {self.world.size} {self.world.kind} ranks"
        trust = device_spec(self.device).trust
        return "\n".join(
            [f"Study({where}, simulated on {self.device}, {trust})", *aligned(rows, range(1, 7))]
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


def difference(recipe: Recipe, changes: Mapping[str, Any], *, device: str = "h100") -> Difference:
    """What changes of a recipe do, on fake worlds; changes, device and errors are those of `what_if`."""
    changed = recipe.override(changes)
    size, other_size = recipe.mesh.world_size, changed.mesh.world_size
    with fake_world(size) as world:
        study = what_if(recipe, world, device=device)
        if other_size == size:
            return study.change(changes)
    with fake_world(other_size) as world:
        other = what_if(changed, world, device=device)
    differences = diff_recipes(recipe, changed)
    return Difference(differences, study.now, other.now, other.ran, [], other.seconds)


def command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench what-if`."""
    if not args.set:
        raise WorkbenchError("what-if: give a change, such as --set mesh.tp=2")
    answer = difference(load_recipe(args.recipe), dict(args.set), device=args.device)
    print(answer)
    return FAILED if answer.after.outcome is Outcome.FAIL else PASSED


class _Calls:
    """The calls of one answer: the result of each is kept by what it reads, and by what the calls before it read.

    names: of all calls. ran: of those that were made, with their seconds.
    """

    def __init__(
        self, results: OrderedDict[str, Any], tell: Callable[[str], Any], *reads: Any
    ) -> None:
        self.results, self.tell, self.key = results, tell, fingerprint(*reads)
        self.names: list[str] = []
        self.ran: dict[str, float] = {}

    def __call__(self, name: str, make: Callable[[], T], *reads: Any) -> T:
        """`make()`, from memory where all that was read is as it was.

        reads: code as objects, recipe and options as text, since equal texts may be pickled in two ways.
        """
        self.key = fingerprint(self.key, name, *map(fingerprint, reads))
        if self.key not in self.results:
            self.tell(name)
            started = time.perf_counter()
            self.results[self.key] = make()
            self.ran[name] = time.perf_counter() - started
        self.results.move_to_end(self.key)
        self.names.append(name)
        result: T = self.results[self.key]
        return result


def _graphs(
    recipe: Recipe, world: World, call: _Calls
) -> tuple[JointGraph, Split]:
    """The calls of `build`, up to its last pass. No call changes what another returned."""
    table, step = capture_decompositions(recipe.joint_passes) is not None, recipe.training.step
    authored = call(
        "author",
        lambda: author(recipe, world),
        repr(recipe.model_dump(exclude=_LATER)),
        author_module,
        random_tokens,
        find_family(recipe.model.family),
    )
    joint = call(
        "capture",
        lambda: capture_joint(recipe, authored),
        repr((table, step, recipe.capture)),
        capture,
        hook_of("capture", recipe.capture),
        lowering.decomposition_table,
    )
    for spec in recipe.joint_passes:
        joint = call(spec.name, partial(_after, run_joint, joint, spec), *_reads(spec))
    tags = [find_pass(spec.name).partition_effect for spec in recipe.joint_passes]
    split: Split = call("partition", lambda: partition(joint.fork()), partition, joint.cut, tags)
    early = passes_before(recipe.passes, LATE)
    for spec in early:
        split = call(spec.name, partial(_after, run_partitioned, split, spec), *_reads(spec))
    if step != "pair":
        kind, pair = step_kind(recipe), split.pair
        split = call(
            "join",
            lambda: kind.join(recipe, pair.fork()),
            repr((recipe.training.model_dump(), table)),
            type(kind),
        )
    for spec in recipe.passes[len(early):]:
        split = call(spec.name, partial(_after, run_partitioned, split, spec), *_reads(spec))
    return joint, split


def _after(run: Callable[..., Any], graphs: Any, spec: PassSpec) -> Any:
    """A fork of the graphs behind the pass."""
    fork = graphs.fork()
    run(fork, [spec])
    return fork


def _reads(spec: PassSpec) -> tuple[Any, ...]:
    """The options of a pass, what the files hold that they name, and its code."""
    item, options = choose(spec, tuple(Stage), "what_if")
    values = options.model_dump()
    files = [value for value in values.values() if isinstance(value, str) and isfile(value)]
    hashes = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    return repr((values, hashes)), item
