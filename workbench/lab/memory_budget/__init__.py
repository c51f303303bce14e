"""memory_budget: the backward computes again what torch's partitioner chooses, so that the saved tensors fit a budget.

The pass looks for the largest `activation_memory_budget` of torch, a share from 0 to 1, whose cut saves no more bytes
than asked for, and has the partition use it. Three layers save one sigmoid each, and half of that may stay. The last
two layers' products and sigmoids run again, from the first layer's sigmoid:

    >>> example("memory_budget", lambda x, weight: (x @ weight).sigmoid(), graph="backward", layers=3, fraction=0.5)
    before:
      ...
      sigmoid: float32 [4, 4]  # input
      sigmoid_1: float32 [4, 4]  # input
      detach_3: float32 [4, 4]  # input
      ...
    after:
      ...
      sigmoid: float32 [4, 4]  # input
      t_4: float32 [4, 4]  # input
      ...
      mm_1: float32 [4, 4] = aten.mm(sigmoid, primals_2)  # layers.1
      sigmoid_1: float32 [4, 4] = aten.sigmoid(mm_1)  # layers.1
      mm_2: float32 [4, 4] = aten.mm(sigmoid_1, primals_3)  # layers.2
      sigmoid_2: float32 [4, 4] = aten.sigmoid(mm_2)  # layers.2
      ...

    plan        torch's cuts, the search among them, and what is saved and repeated
    plan_table  `memory_plan` and `workbench plan`: the plan as a table
"""

import argparse
from pathlib import Path

from pydantic import Field, model_validator

from workbench.recipe.contracts import Numerics, Options, PassContract, Stage, declare
from workbench.recipe.plugins import Command, declare_command


class BudgetOptions(Options):
    """gib: the most that may be saved between forward and backward, in GiB; each storage counts once, the step's inputs
    not at all. fraction: the same as a share of what is saved without this pass; give one of the two.

    device: of the milliseconds that the plan states. recomputable: operators of other libraries than torch that draw no
    random numbers, such as "mylib.rotate"; the others are saved.
    """

    gib: float | None = Field(None, ge=0)
    fraction: float | None = Field(None, ge=0, le=1)
    device: str = "h100"
    recomputable: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_budget(self) -> "BudgetOptions":
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
    "what is saved fits the budget, and the backward computes the rest again",
    BudgetOptions,
    after=frozenset({"activation_checkpointing", "inductor_decomposition", "reshard_after_forward"}),
    needs=frozenset({"partitioner"}),
    source="torch._functorch.config.activation_memory_budget",
    code="workbench.lab.memory_budget.transform",
))


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--front", action="store_true",
                        help="also what torch saves under budgets from 1 to 0.1")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="also write the result as JSON; - prints it alone")


declare_command(Command(
    "plan", "what memory_budget saves and computes again, beside the same recipe without it",
    "Capture a recipe that lists memory_budget on a fake world, and show its plan: each tensor, its "
    "bytes, what is chosen, and the milliseconds of the products that run again. Nothing is run.",
    _arguments, "workbench.lab.memory_budget.plan_table:plan",
    recipe="change the recipe, such as joint_passes.memory_budget.fraction=0.4; may be repeated",
))
