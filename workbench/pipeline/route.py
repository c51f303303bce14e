"""The route from a recipe to a compiled step: one list of stages, which `build`, `what_if` and other tools walk.

A tool may stop before the last stage, start after the first, or add a stage of its own. This is the whole list:

    author      recipe and world: the model, sharded, on this rank
    capture     the joint graph of forward and backward
    (a stage for each joint pass)
    partition   the joint graph: forward and backward; of a traced one, what is computed again is placed first
    (a stage for each other pass, which transforms both graphs, lowers them or replays them)
    lower       the ranks compare their collectives; both graphs get the functions that run them

Where the recipe asks for the whole step in one graph, a stage `join` stands behind the passes of the partitioned stage,
and the passes behind it work on the joined graph.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.fx import GraphModule

from workbench.authoring.author import Authored, author, author_module, random_tokens
from workbench.authoring.families import find_family
from workbench.authoring.plans import ParallelPlan
from workbench.checks import joining, recomputation, static
from workbench.checks.order import take_back
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Verdict
from workbench.graph.capture import JointGraph, capture
from workbench.graph.lower import bind
from workbench.graph.partition import ForwardBackward, Partitioned, partition
from workbench.graph.saving.recomputation import cut
from workbench.graph.step_graph import StepGraph, join, require_joinable
from workbench.graph.update import Update
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import (
    JOINT,
    PARTITIONED,
    WHOLE,
    Joint,
    agree_on_collectives,
    capture_decompositions,
    choose,
    prove_partition,
    run_joint,
    run_partitioned,
)
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec
from workbench.torch_api import aot
from workbench.torch_api.inductor import lowering
from workbench.world.mesh import World

TIMED = ("author", "capture", "joint passes", "partition", "passes", "compile")
Kind = Stage | Literal["author", "capture", "partition", "join", "lower"]
_LATER: dict[str, Any] = {
    **dict.fromkeys(("name", "about", "capture", "strict", "free_order", "expect", "joint_passes", "passes"), True),
    "training": {"steps", "step", "nan_norm", "read_loss_every", "optimizer", "lr", "clip"}, "data": {"path"},
}
"""What neither the model nor its graph depends on; any other change of a recipe needs a new model."""


@dataclass
class StepState:
    """What the stages have made so far; an attribute is missing until its stage has run.

    captured: the joint graph before its first pass. bodies: what a lowering or replay pass made of both graphs.
    schedule: whether the collectives of all ranks agree. joined: the whole step in one graph, where the recipe asks for
    it, and joining: what the checks found of the join, and of the recomputation that was placed in a traced graph.
    """

    authored: Authored = field(init=False)
    joint: Joint = field(init=False)
    captured: GraphModule = field(init=False)
    pair: Partitioned = field(init=False)
    joined: StepGraph = field(init=False)
    joining: list[Verdict] = field(default_factory=list)
    bodies: tuple[Any, ...] | None = None
    schedule: Verdict = field(init=False)
    records: list[PassRecord] = field(default_factory=list)
    seen: static.Seen = field(default_factory=static.Seen)

    @property
    def joint_graph(self) -> JointGraph:
        assert isinstance(self.joint, JointGraph)
        return self.joint

    @property
    def forward_backward(self) -> ForwardBackward:
        assert isinstance(self.pair, ForwardBackward)
        return self.pair

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The graphs as they are now: joint, forward and backward, or the whole step."""
        return self.split.graphs if hasattr(self, "pair") else (self.joint.graph,) if hasattr(self, "joint") else ()

    @property
    def split(self) -> Partitioned | StepGraph:
        """What the stages behind the partition work on: the pair, and once it is joined the whole step."""
        return self.joined if hasattr(self, "joined") else self.pair

    def fork(self) -> StepState:
        """Another state that later stages may change, while this one stays as it is."""
        other = copy.copy(self)
        other.records = list(self.records)
        if hasattr(self, "joined"):
            other.joined = self.joined.fork()
        elif hasattr(self, "pair"):
            other.pair = self.forward_backward.fork()
        elif hasattr(self, "joint"):
            other.joint = self.joint_graph.fork()
        return other

    def forget_old_graphs(self) -> None:
        """Let go of what the checks read from graphs that a pass has replaced."""
        self.seen = self.seen.of(self.graphs)


@dataclass(frozen=True)
class RouteStage:
    """One stage: `run` adds its result to a state, in place.

    name: as progress and `what_if` show it. kind: what it is; of a pass, the stage of its contract. reads: what its
    result depends on beside the stages before it.
    """

    name: str
    kind: Kind
    run: Callable[[StepState], None]
    reads: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> str:
        """The row of `Built.seconds` that its time belongs to, one of TIMED."""
        if self.kind == "join" or self.kind in (*PARTITIONED, *WHOLE):
            return "passes"
        return "joint passes" if self.kind is Stage.JOINT else "compile" if self.kind == "lower" else self.name


def route(recipe: Recipe, world: World, *, plan: ParallelPlan | None = None) -> list[RouteStage]:
    """Every stage from `recipe` to a step on this rank of `world`.

    plan: placements in the place of the model family's own. Raises WorkbenchError for an unknown pass or a wrong
    option, before anything has run.
    """
    whole = recipe.training.step == "whole"
    return [_author(recipe, world, plan), _capture(recipe, whole), *joint_stages(recipe.joint_passes),
            _partition(recipe.joint_passes), *(whole_stages(recipe) if whole else pair_stages(recipe.passes)), LOWER]


def walk(
    stages: Sequence[RouteStage],
    state: StepState | None = None,
    *,
    progress: Callable[[str], Any] = lambda _: None,
    seconds: dict[str, float] | None = None,
) -> StepState:
    """Run `stages` in order on `state`, by default a new one.

    `progress` hears the name of each before it runs, but for the last, which takes no time of its own. `seconds`
    gets the wall time, by row.
    """
    state = state or StepState()
    for stage in stages:
        if stage is not LOWER:
            progress(stage.name)
        started = time.perf_counter()
        stage.run(state)
        if seconds is not None:
            seconds[stage.timed] = seconds.get(stage.timed, 0.0) + time.perf_counter() - started
    return state


def upto(stages: Sequence[RouteStage], kind: Kind) -> int:
    """The number of stages before the first of this kind, or of a later one; of all, where there is none."""
    return next((i for i, stage in enumerate(stages) if _ORDER.index(stage.kind) >= _ORDER.index(kind)), len(stages))


_ORDER: tuple[Kind, ...] = ("author", "capture", Stage.JOINT, "partition", Stage.PARTITIONED, "join", *WHOLE, "lower")


def _author(recipe: Recipe, world: World, plan: ParallelPlan | None) -> RouteStage:
    def run(state: StepState) -> None:
        state.authored = author(recipe, world, plan=plan)

    code = (author_module, random_tokens, find_family(recipe.model.family))
    return RouteStage("author", "author", run, {"recipe": recipe.model_dump(exclude=_LATER), "plan": plan,
                                                "code": code})


def _capture(recipe: Recipe, whole: bool) -> RouteStage:
    table = capture_decompositions(recipe.joint_passes)

    def run(state: StepState) -> None:
        if whole:
            require_joinable(state.authored)
        state.joint = capture(state.authored, decompositions=table, by=recipe.capture)
        state.captured = state.joint.graph

    return RouteStage("capture", "capture", run, {"recipe": (table is not None, whole, recipe.capture),
                                                  "code": (capture, lowering.decomposition_table)})


def joint_stages(specs: Sequence[PassSpec]) -> list[RouteStage]:
    """A stage for each joint pass."""
    return [_of_pass(spec, JOINT, _run_joint(spec)) for spec in specs]


def pair_stages(specs: Sequence[PassSpec]) -> list[RouteStage]:
    """A stage for each pass on forward and backward."""
    return [_of_pass(spec, PARTITIONED, _run_split(spec)) for spec in specs]


def whole_stages(recipe: Recipe) -> list[RouteStage]:
    """A stage for each pass on forward and backward, the join, and a stage for each pass on the joined graph."""
    stages = [find_pass(spec.name).contract.stage for spec in recipe.passes]
    before = next((i for i, stage in enumerate(stages) if stage in WHOLE), len(stages))
    return [*pair_stages(recipe.passes[:before]), _join(recipe),
            *[_of_pass(spec, WHOLE, _run_split(spec)) for spec in recipe.passes[before:]]]


def _join(recipe: Recipe) -> RouteStage:
    spec = recipe.training
    decomposed = any(each.name == "inductor_decomposition" for each in recipe.joint_passes)
    update = Update(spec.clip, spec.nan_norm == "skip")

    def run(state: StepState) -> None:
        table = lowering.decomposition_table() if decomposed else None
        state.joined = join(state.forward_backward, update, microbatches=spec.accumulate, decompositions=table)
        state.joining = [*state.joining, *joining.check(state.joined)]
        state.seen = static.Seen()

    return RouteStage("join", "join", run, {"recipe": (update, decomposed, spec.accumulate), "code": (join,)})


def _of_pass(spec: PassSpec, stages: Sequence[Stage], run: Callable[[StepState], None]) -> RouteStage:
    item, options = choose(spec, stages, "joint_passes" if stages is JOINT else "passes")
    reads = {"options": options, "code": (item.function, item.effect, item.contract, static.check)}
    return RouteStage(spec.name, item.contract.stage, run, reads)


def _run_joint(spec: PassSpec) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        state.records += run_joint(state.joint, [spec], seen=state.seen)
        state.forget_old_graphs()

    return run


def _run_split(spec: PassSpec) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        records, state.bodies = run_partitioned(state.split, [spec], seen=state.seen, bodies=state.bodies)
        state.records = take_back([*state.records, *records])
        if hasattr(state, "joint") and getattr(state.joint, "traced", False):
            state.joining = recomputation.take_back(state.joining, records)
        state.forget_old_graphs()

    return run


def divided(joint: JointGraph) -> ForwardBackward:
    """Forward and backward, by torch's partitioner; of a traced graph by its tags."""
    return cut(joint) if joint.traced else partition(joint)


def _partition(specs: Sequence[PassSpec]) -> RouteStage:
    def run(state: StepState) -> None:
        joint = state.joint_graph
        take_pair(state, divided(joint))
        state.joining = [recomputation.check(joint.graph, state.pair)] if joint.traced else []

    return RouteStage("partition", "partition", run, {
        "code": (partition, cut, [(spec.name, find_pass(spec.name).partition_effect) for spec in specs])})


def take_pair(state: StepState, pair: Partitioned) -> None:
    """Go on with the graphs that a partitioner made, and prove the joint passes that only tagged nodes for it."""
    state.pair, state.seen = pair, static.Seen()
    state.records = [replace(record, verdicts=list(record.verdicts)) for record in state.records]
    prove_partition(state.records, pair)


def _lower(state: StepState) -> None:
    state.schedule = agree_on_collectives(state.split)
    if hasattr(state, "joined"):
        state.joined.require_usable()
        (state.joined.body,) = state.bodies or map(aot.boxed, state.joined.graphs)
    else:
        bind(state.pair, state.bodies)


LOWER = RouteStage("lower", "lower", _lower)
