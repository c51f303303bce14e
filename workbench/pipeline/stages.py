"""The stages that a recipe's lists of passes decide: how it is captured, divided, joined and lowered.

The road itself is in `build`, from top to bottom; tools that stop before its end, or start behind its beginning, call
the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any

from workbench.authoring.author import author
from workbench.authoring.authored import Authored
from workbench.checks.verdicts import Verdict
from workbench.graph.capture import JointGraph, capture
from workbench.graph.lower import CompiledStep, Step, bind
from workbench.graph.partition import ForwardBackward, Partitioned, Split, partition
from workbench.passes.registry import find_pass
from workbench.pipeline.run_passes import (
    capture_decompositions,
    run_joint,
    run_partitioned,
)
from workbench.recipe.contracts import Stage
from workbench.recipe.hooks import hook_of
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec
from workbench.world.mesh import World

Tell = Callable[[str], Any]
LATE = (Stage.STEP, Stage.LOWERING, Stage.REPLAY)
"""The stages of the passes that run on what the kind of step makes of the pair."""


class PairStep:
    """`training.step = "pair"`, and the base of the kinds that plugins declare: see `declare_hook`."""

    def require(self, authored: Authored) -> None:
        """Raise WorkbenchError, before anything is captured, for a module that no such step can be made of."""

    def join(self, recipe: Recipe, pair: ForwardBackward) -> Split:
        """The graphs that the passes of the step, lowering and replay stages run on."""
        return pair

    def step(self, split: Split) -> Step:
        """What trains, once the graphs are lowered."""
        return CompiledStep(split)

    def numbers(self, split: Split) -> dict[str, Any]:
        """What `restored` needs beside the graphs' code, to be pickled; empty where that is nothing."""
        return {}

    def restored(self, pair: ForwardBackward, numbers: Mapping[str, Any]) -> Split:
        """The graphs of an artifact, each of which is a slot of `pair`."""
        return pair


def step_kind(recipe: Recipe) -> PairStep:
    """How the recipe's training step is made of its forward and backward."""
    kind: PairStep = hook_of("training.step", recipe.training.step)()
    return kind


def capture_joint(recipe: Recipe, authored: Authored, kind: PairStep | None = None) -> JointGraph:
    """The joint graph as the recipe's first pass receives it."""
    (kind or step_kind(recipe)).require(authored)
    table = capture_decompositions(recipe.joint_passes)
    return capture(authored, decompositions=table, by=recipe.capture)


def passes_before(specs: Sequence[PassSpec], stages: Collection[Stage]) -> list[PassSpec]:
    """The passes before the first of these stages."""
    return list(takewhile(lambda spec: find_pass(spec.name).contract.stage not in stages, specs))


def run_later(recipe: Recipe, pair: ForwardBackward, specs: Sequence[PassSpec],
              kind: PairStep | None = None, *, progress: Tell = lambda _: None) -> Split:
    """Run passes of the recipe on the pair, and the later ones on what the kind of step, by default the recipe's, makes
    of it; returns what the last pass left.
    """
    early = passes_before(specs, LATE)
    run_partitioned(pair, early, progress=progress)
    split = (kind or step_kind(recipe)).join(recipe, pair)
    run_partitioned(split, specs[len(early):], progress=progress)
    return split


def lower(split: Partitioned) -> Verdict:
    """Give the graphs the functions that run them; returns whether the collectives of all ranks agree.

    Every rank calls it. Raises WorkbenchError on every rank where they do not.
    """
    agreement: Verdict = hook_of("check", "agreement")(split)
    bind(split, split.known.bodies)
    return agreement


def before_lowering(
    recipe: Recipe, world: World, *, captured: Callable[[JointGraph], Any] = lambda _: None,
    progress: Tell = lambda _: None,
) -> Split:
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
        pair = partition(joint)
    specs = passes_before(recipe.passes, (Stage.LOWERING, Stage.REPLAY))
    return run_later(recipe, pair, specs, progress=progress)
