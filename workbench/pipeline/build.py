"""`build`: walk the whole route from a recipe to a compiled training step, with a record of each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.authoring.author import author
from workbench.authoring.authored import Authored
from workbench.checks.record import step_verdicts
from workbench.checks.verdicts import Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph, title
from workbench.graph.facts import Known
from workbench.graph.lower import Step
from workbench.graph.partition import partition
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import Level, PassRecord, choose, each_no_effect, run_joint, saved_bytes
from workbench.pipeline.stages import PairStep, capture_joint, lower, run_later, step_kind
from workbench.recipe.contracts import Stage
from workbench.recipe.hooks import hook_of
from workbench.recipe.recipe import Recipe, parse_recipe
from workbench.recipe.rules import cuda_reasons
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.supported import require_compiler
from workbench.world.mesh import World, all_gather_object


@dataclass
class Built:
    """A compiled step and what was proved on the way. `seconds` is wall time by stage.

    step: a CompiledStep, or what the recipe's kind of step makes. known: what this run has learned, for the verdicts.
    schedule: whether the ranks' collectives agree. captured: the joint graph as the passes received it.
    """

    authored: Authored
    step: Step
    known: Known = field(repr=False)
    schedule: Verdict
    captured: GraphModule = field(repr=False)
    seconds: dict[str, float] = field(default_factory=dict)
    saved_bytes: int = 0

    @property
    def records(self) -> list[PassRecord]:
        return self.known.records

    @property
    def pipeline(self) -> list[Verdict]:
        """The verdicts on the list of passes, and on the join, by what is known now."""
        return step_verdicts(self.known)

    def __repr__(self) -> str:
        rows = ", ".join(f"{r.name} {r.outcome}" for r in self.records) or "no passes"
        return f"Built({title(self.authored)} on {self.authored.world.kind}: {rows})"


def check_buildable(recipe: Recipe, world_kind: str) -> None:
    """Refuse, before anything is authored, what a world of this kind or the list of passes cannot do."""
    where = f"recipe {recipe.name!r}"
    require_machine(recipe, world_kind, where)
    # again: a pass may have been registered after the recipe was read
    parse_recipe(recipe.to_dict(), where)


def require_machine(recipe: Recipe, world_kind: str, where: str) -> None:
    """Raise WorkbenchError for an unknown pass or option, and for what a pass needs and a world of this kind lacks."""
    cuda = world_kind in ("auto", "nccl") and torch.cuda.is_available()
    reasons = cuda_reasons(recipe.pass_names, recipe.model.attention)
    for spec in (*recipe.joint_passes, *recipe.passes):
        item, _ = choose(spec, tuple(Stage), where)
        needs = item.contract.needs
        if "compiler" in needs:
            require_compiler()
        if spec.name in reasons and not cuda and not (world_kind == "fake" and "cuda" in needs):
            raise WorkbenchError(
                f"pass {spec.name!r} needs CUDA ({reasons[spec.name]}), and world {world_kind} has none "
                "here: take world nccl on a machine with GPUs, or drop the pass"
            )


def build(
    recipe: Recipe, world: World, *, level: Level = "light", progress: Progress = True,
    captured: Callable[[JointGraph], None] | None = None,
) -> Built:
    """Author, capture, transform, partition and compile `recipe` on this rank of `world`.

    Every rank calls it. level "full" also runs each pass's graph against the one it received, on real ranks.
    progress: as for `run`. `captured` gets the joint graph before its first pass, to be read and forked.

    Raises WorkbenchError where a pass is unknown, the ranks' collectives differ, or the recipe is strict and a pass
    had no effect.
    """
    if not isinstance(world, World):
        raise WorkbenchError(f"build takes this rank's World, and not {world!r}: run(recipe, world=...) starts ranks")
    check_buildable(recipe, world.kind)
    with telling(progress) as tell:
        clock = Clock(tell)
        with clock("author"), uncollected():
            authored = author(recipe, world)
        kind = step_kind(recipe)
        built = build_authored(recipe, authored, kind, level=level, clock=clock, captured=captured)
    refuse_no_effect(recipe, all_gather_object(dict(each_no_effect(built.records))))
    return built


def build_authored(
    recipe: Recipe, authored: Authored, kind: PairStep, *,
    level: Level, clock: Clock, captured: Callable[[JointGraph], None] | None = None,
) -> Built:
    """The same from an authored module on, whose step is of this kind: passes without effect are not refused."""
    # the backward refuses to run under another setting
    with deterministic(authored.deterministic):
        built = _build(recipe, authored, kind, clock, captured)
        if level == "full":
            with clock("numerics"):
                hook_of("level", level)(built.records, built.step)
        else:
            why = 'level "full" compares two steps'
            built.known.side_effects = built.step.pair.side_effects, why
    return built


@uncollected()
def _build(
    recipe: Recipe, authored: Authored, kind: PairStep, clock: Clock, note: Callable[[JointGraph], None] | None
) -> Built:
    with clock("capture"):
        joint = capture_joint(recipe, authored, kind)
    before = joint.graph
    with joint:
        if note is not None:
            note(joint)
        with clock("joint passes", announce=False):
            run_joint(joint, recipe.joint_passes, progress=clock.tell)
        with clock("partition"):
            pair = partition(joint)
    with clock("passes", announce=False):
        split = run_later(recipe, pair, recipe.passes, kind, progress=clock.tell)
    with clock("compile", announce=False):
        schedule = lower(split)
    step = kind.step(split)
    split.known.built = True
    return Built(authored, step, split.known, schedule, before, clock.seconds, saved_bytes(pair))


class Clock:
    """Wall seconds by stage; each stage is told before it begins."""

    def __init__(self, tell: Callable[[str], Any]) -> None:
        self.tell = tell
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str, *, announce: bool = True) -> Iterator[None]:
        if announce:
            self.tell(stage)
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started


def refuse_no_effect(recipe: Recipe, ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise WorkbenchError where the recipe is strict and a pass without leave had no effect on any rank.

    ranks: of each rank, its passes without effect, and why.
    """
    allowed = recipe.expect.no_effect
    idle = [f"{name}: {why}" for name, why in ranks[0].items()
            if name not in allowed and all(name in names for names in ranks)]
    if recipe.strict and idle:
        problem = f"is strict and these passes had no effect: {'; '.join(idle)}"
        raise WorkbenchError(f"recipe {recipe.name!r} {problem}")
