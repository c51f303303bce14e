"""memory_budget: the backward computes again what costs least time, so that the saved tensors fit into a budget.

The pass tags nodes of the joint graph, and the partitioner reads the tags. Two layers save one sigmoid each, and half
of that may stay: the last layer's product and sigmoid run again, from the first layer's sigmoid:

    >>> example("memory_budget", lambda x, weight: (x @ weight).sigmoid(), graph="backward", layers=2, fraction=0.5)
    before:
      ...
      sigmoid: float32 [4, 4]  # input
      detach_2: float32 [4, 4]  # input
      ...
      sigmoid_backward: float32 [4, 4] = aten.sigmoid_backward(expand, detach_2)  # layers.1
      ...
    after:
      ...
      sigmoid: float32 [4, 4]  # input
      tangents_1: float32 []  # tangent
      ...
      mm_1: float32 [4, 4] = aten.mm(sigmoid, primals_2)  # layers.1
      sigmoid_1: float32 [4, 4] = aten.sigmoid(mm_1)  # layers.1
      ...

    effects     the plan against the tags, and against what the partitioner made of them
    plan_table  `memory_plan` and `workbench plan`: the plan as a table
"""

import argparse
from pathlib import Path

from pydantic import Field, model_validator

from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage, declare
from workbench.recipe.plugins import Command, declare_command


class BudgetOptions(EstimateOptions):
    """gib: the most that may be saved between forward and backward, in GiB; each storage counts once, the step's inputs
    not at all. fraction: the same as a share of what is saved without this pass; give one of the two.

    keep, recompute: patterns `MODULE` or `MODULE:OPERATOR`, such as "layers.*.attention:mm", whose tensors are saved
    or computed again in any case. collectives: those of activations may run again. device, estimates: of the times, of
    kernels fused as a compiler fuses them unless `fused` is false.
    """

    gib: float | None = Field(None, ge=0)
    fraction: float | None = Field(None, ge=0, le=1)
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    collectives: bool = False
    fused: bool = True

    @model_validator(mode="after")
    def _one(self) -> "BudgetOptions":
        if self.gib is not None and self.fraction is not None:
            raise ValueError("gib and fraction are both given: give one of them")
        return self

    def bytes(self, now: int) -> int:
        """The budget. now: what is saved without the pass. Without gib and fraction, half of that."""
        if self.gib is not None:
            return int(self.gib * 2**30)
        return int((0.5 if self.fraction is None else self.fraction) * now)


declare(PassContract(
    "memory_budget", Stage.JOINT, Numerics.EXACT,
    "what is saved fits the budget, and the backward computes the rest again in the least time",
    BudgetOptions, conflicts=frozenset({"activation_checkpointing"}),
    after=frozenset({"inductor_decomposition", "reshard_after_forward"}),
    source="an integer program, solved by HiGHS (highs.dev)", code="workbench.lab.memory_budget.transform",
))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", metavar="RECIPE", help="show only what this recipe's plan treats differently")
    parser.add_argument("--front", action="store_true", help="also the plans of other budgets, and torch's own")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON; - prints it alone")


declare_command(Command(
    "plan", "what memory_budget saves and computes again, beside torch's own choice",
    "Capture a recipe that lists memory_budget on a fake world, and show its plan: each tensor, its bytes, what is "
    "chosen, and the milliseconds that computing it again takes. Nothing is run.",
    _arguments, "workbench.lab.memory_budget.plan_table:plan",
    recipe="change the recipe, such as joint_passes.memory_budget.fraction=0.4; may be repeated",
))
