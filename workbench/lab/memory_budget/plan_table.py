"""`memory_plan`: what the pass memory_budget would save of a recipe, beside torch's own choice, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from workbench.authoring.author import author
from workbench.errors import WorkbenchError
from workbench.graph.saving.choose import choose
from workbench.graph.saving.partitioner import Cut, torch_cut
from workbench.graph.saving.plan import Choice, MemoryPlan, alike
from workbench.lab.memory_budget import BudgetOptions
from workbench.lab.memory_budget.transform import plan_of
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.run_passes import run_joint
from workbench.pipeline.stages import capture_joint
from workbench.recipe.files import print_result, writable
from workbench.recipe.recipe import Recipe, load_recipe
from workbench.recipe.wording import aligned, json_text
from workbench.torch_api.garbage import uncollected
from workbench.world.fake import fake_world
from workbench.world.mesh import World

NAME = "memory_budget"
_HEAD = ("tensor", "module", "operator", "bytes", "choice", "torch", "ms", "fixed")
SHARES = tuple(i / 10 for i in range(10, -1, -1))


@dataclass(frozen=True)
class Planned:
    """plan: of the recipe's memory_budget. now: what the partitioner saves without it. torch: what it saves under the
    largest of its own budgets that saves no more than `plan` may; None where none does, or for a traced graph. front:
    plans of other budgets, and torch_front torch's own, where they were asked for.
    """

    recipe: str
    plan: MemoryPlan
    now: Cut
    torch: Cut | None
    front: tuple[MemoryPlan, ...] = field(default=(), repr=False)
    torch_front: tuple[Cut, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [f"{self.recipe}: {self.plan.summary}"]
        lines.append(f"without a budget: {self.now.bytes:,} bytes, {self.now.ms:.4g} ms")
        if self.torch is not None:
            lines.append(f"torch's activation_memory_budget = {self.torch.share:g}: {self.torch.bytes:,} bytes, "
                         f"{self.torch.ms:.4g} ms")
        lines += aligned([_HEAD, *((*row[:3], f"{row[3]:,}", *row[4:6], f"{row[6]:.4g}", row[7])
                                   for row in self.rows())], (3, 6))
        if self.front:
            lines += ["", *self.front_table()]
        return "\n".join(lines)

    def rows(self, least: int = 0) -> list[tuple[Any, ...]]:
        """Tensor, module, operator, bytes, choice, torch's choice, ms, why it is fixed; of `least` bytes and more.

        Alike layers that are treated alike share a row.
        """
        return [(row.name, row.module, row.operator, row.bytes, row.choice, self._torchs(group), row.ms, row.fixed)
                for row, group in alike(self.plan.choices) if row.bytes >= least]

    def _torchs(self, group: Sequence[Choice]) -> str:
        if self.torch is None:
            return ""
        count = sum(each.name in self.torch.saved for each in group)
        return "recompute" if not count else "save" if count == len(group) else f"save {count} of {len(group)}"

    def front_table(self) -> list[str]:
        """The bytes and milliseconds of each plan of the front, and of torch's budgets."""
        rows = [("plan", f"{p.saved_bytes:,}", f"{p.ms:.4g}", f"{p.gap:.1%}") for p in self.front]
        rows += [(f"torch {cut.share:g}", f"{cut.bytes:,}", f"{cut.ms:.4g}", "") for cut in self.torch_front]
        return aligned([("", "saved bytes", "ms again", "gap"), *rows], (1, 2, 3))

    def points(self) -> dict[str, tuple[float, float]]:
        """(MiB saved, ms computed again) of the front, by a name that says who chose."""
        found = {f"plan {i}": (p.saved_bytes / 2**20, p.ms) for i, p in enumerate(self.front)}
        return found | {f"torch {c.share:g}": (c.bytes / 2**20, c.ms) for c in self.torch_front}

    def to_json(self) -> str:
        return json_text(asdict(self))


@uncollected()
def memory_plan(recipe: Recipe, world: World | None = None, *, front: bool = False,
                progress: Progress = True) -> Planned:
    """Capture `recipe` on `world`, by default a fake one of its mesh, and plan what is saved. Nothing is run.

    front: also plan budgets from all that the backward reads down to the least, and torch's own budgets. progress: as
    for `run`. Raises WorkbenchError for a recipe without memory_budget, and as the pass does.
    """
    spec = next((each for each in recipe.joint_passes if each.name == NAME), None)
    if spec is None:
        raise WorkbenchError(f"recipe {recipe.name!r} lists no {NAME}: add it to joint_passes, such as "
                             f'joint_passes = [{{ name = "{NAME}", fraction = 0.5 }}]')
    options = BudgetOptions.model_validate(dict(spec.options))
    opened: AbstractContextManager[Any] = nullcontext(world) if world else fake_world(recipe.mesh.world_size)
    with opened as here, telling(progress) as tell:
        tell("author")
        authored = author(recipe, here)
        tell("capture")
        with capture_joint(recipe, authored) as joint:
            run_joint(joint, recipe.joint_passes[: recipe.joint_passes.index(spec)], progress=tell)
        gm = joint.graph
        tell("plan")
        producers, plan = plan_of(gm, options)
        now = torch_cut(gm, producers)
        cuts = () if now.share is None else tuple(torch_cut(gm, producers, share) for share in SHARES)
    fitting = [cut for cut in cuts if cut.bytes <= plan.budget]
    most = sum(each.bytes for made in producers if not made.decided and made.fixed != "repeated"
               for each in made.results if each.read)
    steps = [plan.least + (most - plan.least) * i // 20 for i in range(20, -1, -1)] if front else []
    plans = tuple(choose(producers, budget, plan.device) for budget in steps)
    return Planned(recipe.name, plan, now, max(fitting, key=lambda cut: cut.bytes, default=None), plans,
                   cuts if front else ())


def compared(first: Planned, second: Planned) -> str:
    """The tensors that two plans treat differently, as a table."""
    rows = [((mine or theirs).name, (mine or theirs).module, f"{(mine or theirs).bytes:,}",  # type: ignore[union-attr]
             mine.choice if mine else "-", theirs.choice if theirs else "-")
            for mine, theirs in first.plan.diff(second.plan)]
    head = [f"{each.recipe}: {each.plan.summary}" for each in (first, second)]
    if not rows:
        return "\n".join([*head, "the same choice for each tensor"])
    return "\n".join([*head, *aligned([("tensor", "module", "bytes", "first", "second"), *rows], (2,))])


def plan(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench plan RECIPE`."""
    other = load_recipe(args.against) if args.against else None
    writable(args.json)
    found = memory_plan(recipe, front=args.front)
    print_result(lambda: found if other is None else compared(found, memory_plan(other)), args.json, found.to_json)
    return 0
