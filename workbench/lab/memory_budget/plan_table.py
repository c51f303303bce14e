"""`memory_plan`: what the pass memory_budget would save of a recipe, without running it."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.lab.memory_budget import BudgetOptions
from workbench.lab.memory_budget.plan import SHARES, Cut, MemoryPlan, front_table, make_plan, torch_cut
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import run_joint
from workbench.pipeline.stages import capture_joint
from workbench.recipe.files import print_result, writable
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import json_text
from workbench.torch_api.garbage import uncollected
from workbench.world.fake import fake_world
from workbench.world.mesh import World

NAME = "memory_budget"


@dataclass(frozen=True)
class Planned:
    """plan: of the recipe's memory_budget. front: what torch saves under other budgets, if it was asked for."""

    recipe: str
    plan: MemoryPlan
    front: tuple[Cut, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"{self.recipe}: {self.plan}"]
        if self.front:
            cuts = {f"activation_memory_budget = {cut.share:g}": cut for cut in self.front}
            lines += ["", *front_table(cuts)]
        return "\n".join(lines)

    def to_json(self) -> str:
        return json_text(asdict(self))


@uncollected()
def memory_plan(recipe: Recipe, world: World | None = None, *, front: bool = False,
                progress: Progress = True) -> Planned:
    """Capture `recipe` on `world`, by default a fake one of its mesh, and plan what is saved. Nothing is run.

    front: also cut by torch's budgets from 1 to 0.1. progress: as for `run`. Raises WorkbenchError for a recipe without
    memory_budget, for a traced capture, and as the pass does.
    """
    spec = next((spec for spec in recipe.joint_passes if spec.name == NAME), None)
    if spec is None:
        raise WorkbenchError(
            f"recipe {recipe.name!r} lists no {NAME}: add it to joint_passes, such as "
            f'joint_passes = [{{ name = "{NAME}", fraction = 0.5 }}]'
        )
    options = BudgetOptions.model_validate(dict(spec.options))
    size = recipe.mesh.world_size
    opened: AbstractContextManager[Any] = nullcontext(world) if world else fake_world(size)
    with opened as open_world, telling(progress) as tell:
        tell("author")
        authored = author(recipe, open_world)
        tell("capture")
        with capture_joint(recipe, authored) as joint:
            run_joint(joint, recipe.joint_passes[: recipe.joint_passes.index(spec)], progress=tell)
        tell("plan")
        plan = make_plan(joint.graph, options)
        cuts = [torch_cut(joint.graph, options, share) for share in SHARES[:-1:2]] if front else []
    return Planned(recipe.name, plan, tuple(cuts))


def plan(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench plan RECIPE`."""
    writable(args.json)
    planned = memory_plan(recipe, front=args.front)
    print_result(lambda: planned, args.json, planned.to_json)
    return 0
