"""The stages that a recipe's lists of passes decide: how it is captured, divided, joined and lowered.

The road itself is in `build`, from top to bottom; tools that stop before its end, or start behind its beginning, call
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import Any

from workbench.authoring.author import author
from workbench.authoring.authored import Authored
from workbench.checks import joining
from workbench.checks.verdicts import Verdict
from workbench.graph.capture import JointGraph, capture
from workbench.graph.lower import bind
from workbench.graph.partition import ForwardBackward, Partitioned, partition
from workbench.graph.saving.recomputation import cut
from workbench.graph.step_graph import StepGraph, join, require_joinable
from workbench.graph.update import Update
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import (
    WHOLE,
    agree_on_collectives,
    capture_decompositions,
    run_joint,
    run_partitioned,
)
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec
from workbench.torch_api import aot
from workbench.torch_api.inductor import lowering
from workbench.world.mesh import World

Split = ForwardBackward | StepGraph
Tell = Callable[[str], Any]


def pair_of(split: Split) -> ForwardBackward:
    """The pair itself, or the one that the whole step was joined of."""
    return split.pair if isinstance(split, StepGraph) else split


def is_whole(recipe: Recipe) -> bool:
    """Whether the recipe asks for its whole step in one graph."""
    return recipe.training.step == "whole"


def capture_joint(recipe: Recipe, authored: Authored) -> JointGraph:
    """The joint graph as the recipe's first pass receives it."""
    if is_whole(recipe):
        require_joinable(authored)
    return capture(authored, decompositions=capture_decompositions(recipe.joint_passes), by=recipe.capture)


def divide(joint: JointGraph) -> ForwardBackward:
    """Forward and backward, by torch's partitioner; of a traced graph by its tags."""
    return cut(joint) if joint.traced else partition(joint)


def join_step(recipe: Recipe, pair: ForwardBackward) -> StepGraph:
    """Forward, backward and the recipe's optimizer in one graph."""
    spec = recipe.training
    decomposed = any(each.name == "inductor_decomposition" for each in recipe.joint_passes)
    table = lowering.decomposition_table() if decomposed else None
    update = Update(spec.clip, spec.nan_norm == "skip")
    step = join(pair, update, microbatches=spec.accumulate, decompositions=table)
    joining.check(step.known)  # kept for later: a pass of the step may choose another order in the facts that it reads
    return step


def passes_before(specs: Sequence[PassSpec], stages: Collection[Stage]) -> list[PassSpec]:
    """The passes before the first of these stages."""
    return list(takewhile(lambda spec: find_pass(spec.name).contract.stage not in stages, specs))


def run_later(recipe: Recipe, pair: ForwardBackward, specs: Sequence[PassSpec], *,
              progress: Tell = lambda _: None) -> Split:
    """Run passes of the recipe on the pair; where it asks for the whole step, join that before the first pass on it.

    Returns what the last pass left: the pair, or the whole step.
    """
    if not is_whole(recipe):
        run_partitioned(pair, specs, progress=progress)
        return pair
    early = passes_before(specs, WHOLE)
    run_partitioned(pair, early, progress=progress)
    progress("join")
    step = join_step(recipe, pair)
    run_partitioned(step, specs[len(early):], progress=progress)
    return step


def lower(split: Partitioned | StepGraph) -> Verdict:
    """Give the graphs the functions that run them; returns whether the collectives of all ranks agree.

    Every rank calls it. Raises WorkbenchError on every rank where they do not.
    """
    agreement = agree_on_collectives(split)
    if isinstance(split, StepGraph):
        split.require_usable()
        (split.body,) = split.known.bodies or map(aot.boxed, split.graphs)
    else:
        bind(split, split.known.bodies)
    return agreement


def before_lowering(recipe: Recipe, world: World, *, captured: Callable[[JointGraph], Any] = lambda _: None,
                    progress: Tell = lambda _: None) -> Split:
    """The recipe's graphs on this rank of `world`, as a compiler would receive them; no step runs.

    `captured` gets the joint graph before its first pass.
    """
    progress("author")
    authored = author(recipe, world)
    progress("capture")
    with capture_joint(recipe, authored) as joint:
        captured(joint)
        run_joint(joint, recipe.joint_passes, progress=progress)
        progress("partition")
        pair = divide(joint)
    specs = passes_before(recipe.passes, (Stage.LOWERING, Stage.REPLAY))
    return run_later(recipe, pair, specs, progress=progress)
