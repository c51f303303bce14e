"""split_backward: what a pipeline's stage sends back is computed first, and its weights' gradients afterwards.

The stage before waits for the former (dI) alone. The latter (dW) may fill a time in which the rank would be idle, and
holds what it reads so long. Here the last of two stages sends the gradient of its input, mm_3:

    >>> example("split_backward", lambda x, weight: x @ weight, layers=2, graph="backward", start="layers.1")
    before:
      ...
      expand: float32 [4, 4] = aten.expand(tangents_1, [4, 4])
      mm_2: float32 [4, 4] = aten.mm(t, expand)  # layers.1
      t_1: float32 [4, 4] = aten.t(primals_2)  # layers.1
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      return (mm_2, mm_3)
    after:
      ...
      expand: float32 [4, 4] = aten.expand(tangents_1, [4, 4])
      t_1: float32 [4, 4] = aten.t(primals_2)  # layers.1
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      mm_2: float32 [4, 4] = aten.mm(t, expand)  # layers.1
      return (mm_2, mm_3)

    cut       the stages of a joint graph, and what crosses their borders
    estimate  a step in estimated time: bubble, live memory and picture
    phases    what of a stage runs once a step, and what for each microbatch
    plan      what each rank does: torch's table of a schedule, checked and timed
    run       `workbench pipeline`: a recipe with a `[pipeline]`
    step      the step on ranks
"""

import argparse
from typing import Any

from pydantic import Field, PositiveInt

from workbench.recipe.contracts import (
    CONTRACTS,
    EstimateOptions,
    Numerics,
    PassContract,
    Stage,
    declare,
)
from workbench.recipe.hooks import declare_hook
from workbench.recipe.plugins import Command, declare_command
from workbench.recipe.sections import Section
from workbench.recipe.strict_toml import Problem

ONE_STAGE = ("GPipe", "1F1B")
"""The schedules in which each rank has one stage. The others take two by default."""
_LATE = (Stage.STEP, Stage.LOWERING, Stage.REPLAY)


class PipelineSpec(Section):
    """A pipeline, where `training.step` is "pipeline". There are `ranks` times as many ranks as the mesh has."""

    stages: tuple[str, ...] | PositiveInt = Field(
        2, description="the first module of each stage but the first, or how many of equal times"
    )
    ranks: PositiveInt | None = Field(
        None, description="of the pipeline: by default as many as stages, or half as many"
    )
    microbatches: PositiveInt = Field(4, description="that a rank's batch is cut into")
    schedule: str = Field(
        "1F1B", description="GPipe, 1F1B, Interleaved1F1B, ZBVZeroBubble, DualPipeV, or torch's"
    )

    @property
    def count(self) -> int:
        """Stages."""
        return self.stages if isinstance(self.stages, int) else len(self.stages) + 1

    @property
    def multiplies_ranks(self) -> int:
        return self.ranks or max(2, self.count // (2 - (self.schedule in ONE_STAGE)))

    def problems(self, recipe: Any) -> list[Problem]:
        batch, step = recipe.data.batch_per_rank, recipe.training.step
        layers = recipe.model.sizes().get("n_layers", self.count)
        problems = dict[str, str]()
        if step != "pipeline":
            problems[""] = f'it is a kind of step, and training.step is "{step}": set it to "pipeline"'
        if batch % self.microbatches:
            problems[".microbatches"] = (
                f"{self.microbatches} do not divide data.batch_per_rank {batch}: change one of them"
            )
        if self.count > layers:
            problems[".stages"] = f"{self.count} are more than the model's {layers} blocks"
        for name in recipe.pass_names:
            if name in CONTRACTS and CONTRACTS[name].stage in _LATE:
                problems[".stages"] = f"no stage can be cut from what pass {name!r} makes: drop one"
        return [Problem(f"pipeline{key}", why) for key, why in problems.items()]


declare_hook("section.pipeline", "workbench.lab.pipeline:PipelineSpec")
declare_hook("training.step.pipeline", "workbench.lab.pipeline.run:refuse")
declare(PassContract(
    "split_backward", Stage.PARTITIONED, Numerics.EXACT,
    "the gradients that a stage sends are computed before those of its parameters", EstimateOptions,
    source="Zero Bubble Pipeline Parallelism, arXiv:2401.10241",
    code="workbench.lab.pipeline.transform",
))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", default="auto", choices=["auto", "fake", "gloo", "nccl"])


declare_command(Command(
    "pipeline", "train a recipe with a [pipeline], and show its stages, bubble and memory",
    "Cut the model into stages, check sends and receives before anything is launched, compare one "
    "step with the uncut model bitwise, and train. Exit status: 0 equal, 1 not, 2 bad input.",
    _arguments, "workbench.lab.pipeline.run:command",
    recipe="change the recipe, such as pipeline.microbatches=8; may be repeated",
))
