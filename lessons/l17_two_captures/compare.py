"""`compare_captures`: one recipe from both captures, their graphs node by node, and the values that they train."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.checks.numerics import compare, verdict
from workbench.checks.verdicts import Outcome, Verdict, worst
from workbench.errors import WorkbenchError
from workbench.pipeline.build import build
from workbench.pipeline.progress import Progress
from workbench.pipeline.recipe_ranks import WorldChoice, on_ranks, runnable
from workbench.pipeline.run_passes import Level
from workbench.pipeline.train import train
from workbench.recipe.contracts import CONTRACTS, Numerics, PassContract, Stage
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import aligned, counted, first_line
from workbench.torch_api.restoring import shard_of
from workbench.world.mesh import all_gather_object, current_world
from workbench.world.ranks import RankPool
from workbench_lessons.l17_two_captures.differences import CAPTURES, CaptureDifference, compare_operators

_BITWISE = PassContract("capture", Stage.JOINT, Numerics.EXACT, "")


@dataclass(frozen=True)
class ComparedCaptures:
    """The result of `compare_captures`.

    refused: why a capture does not take the recipe, by its name. aligned: operators that both graphs have, before any
    pass. differences: all others, of rank 0, by kind. verdicts: the gravest outcome of each capture's passes and joins.
    values: whether both train the same, on every rank. step_seconds: of rank 0's steps, by capture. `print` shows it.
    """

    recipe: str
    refused: dict[str, str]
    aligned: int
    differences: tuple[CaptureDifference, ...]
    verdicts: dict[str, Outcome]
    values: Verdict
    step_seconds: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"recipe {self.recipe}: {counted(self.aligned, 'operator')} in both captures"]
        lines += [f"{name} is refused: {why}" for name, why in self.refused.items()]
        lines += [f"{name}: verdicts {outcome}" for name, outcome in self.verdicts.items()]
        rows = [["kind", "what", *CAPTURES, "nodes"],
                *([d.kind, d.what, str(d.joint), str(d.traced), str(d.count)] for d in self.differences)]
        return "\n".join([*lines, *(aligned(rows) if self.differences else []), str(self.values)])

    __repr__ = __str__


def compare_captures(
    recipe: Recipe | str | os.PathLike[str], *, world: WorldChoice | RankPool = "auto", steps: int = 3,
    timeout: float = 600.0, progress: Progress = True,
) -> ComparedCaptures:
    """Build `recipe` from both captures on every rank, align the two graphs, and train `steps` steps with each.

    world, timeout, progress: as for `run`. A fake world has no values, and its verdict on them is UNKNOWN. A capture
    that refuses the recipe is told in `refused`. Raises WorkbenchError for what this world cannot do with either
    capture, RankError where a rank fails.
    """
    recipe = runnable(recipe, world).override({"training.steps": steps})
    return on_ranks(recipe, world, on_rank, timeout=timeout, progress=progress)[0]


@dataclass
class _Trained:
    """What one capture left on this rank: the graph before any pass, all verdicts, and what training left, by name."""

    graph: GraphModule
    verdicts: list[Verdict]
    values: dict[str, Any] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)


def on_rank(recipe: Recipe, post: Any) -> ComparedCaptures:
    """One rank's part of `compare_captures`: every rank calls it, and gets the same values and refusals."""
    made, refused = dict[str, _Trained](), dict[str, str]()
    for name in CAPTURES:
        try:
            made[name] = _trained(recipe.model_copy(update={"capture": name, "strict": False}), post)
        except WorkbenchError as error:
            refused[name] = first_line(error)
    count, differences = (0, []) if refused else compare_operators(*(made[name].graph for name in CAPTURES))
    outcomes = {name: worst(v for v in trained.verdicts if v.outcome is not Outcome.UNKNOWN)
                for name, trained in made.items()}
    values = _compared(recipe, made if not refused else {})
    return ComparedCaptures(recipe.name, refused, count, tuple(differences), outcomes, values,
                            {name: trained.step_seconds for name, trained in made.items()})


def _trained(recipe: Recipe, post: Any) -> _Trained:
    # what may sum in another order for each capture is held against eager, which sums in one
    level: Level = "full" if _inexact(recipe.pass_names) and not current_world().is_fake else "light"
    built = build(recipe, current_world(), level=level, progress=post.stage)
    assert built.captured is not None
    verdicts = [v for record in built.records for v in record.verdicts] + [*built.pipeline, built.schedule]
    result = _Trained(built.captured, verdicts)
    if built.authored.world.kind in ("gloo", "nccl"):
        post.stage("train")
        seen, module = train(built.authored, built.step, progress=post.step), built.authored.module
        tensors: dict[str, torch.Tensor] = {f"parameter {name}": p for name, p in module.named_parameters()}
        tensors |= {f"buffer {name}": b for name, b in module.named_buffers()}
        result.values = {name: shard_of(value).detach().cpu().clone() for name, value in tensors.items()}
        result.values |= {"losses": torch.tensor(seen.losses), "norms": torch.tensor(seen.norms)}
        result.step_seconds = seen.step_seconds
    built.step.close()
    return result


def _compared(recipe: Recipe, made: dict[str, _Trained]) -> Verdict:
    """The verdict `numerics` on what both captures trained, of all ranks."""
    if not made or not all(trained.values for trained in made.values()):
        why = "a capture refuses the recipe" if not made else "a fake world has no values: run on real ranks"
        return Verdict("numerics", Outcome.UNKNOWN, why)
    joint, traced = (made[name].values for name in CAPTURES)
    ranks = all_gather_object(compare(list(joint.values()), list(traced.values()), _BITWISE, names=list(joint)))
    found, inexact = verdict(ranks), _inexact(recipe.pass_names)
    where = f"after {counted(recipe.training.steps, 'step')} on {counted(len(ranks), 'rank')}"
    eager = {v.outcome for trained in made.values() for v in trained.verdicts if v.check == "numerics"}
    if found.outcome is Outcome.PASS:
        message = f"{len(joint)} tensors are bitwise the same {where}"
    elif inexact and eager == {Outcome.PASS}:
        message = (f"{found.message}, {where}: {inexact[0]} sums in another order for each capture, and each stays "
                   "within its contract against eager")
        found = replace(found, outcome=Outcome.PASS)
    else:
        message = f"{found.message}, {where}"
    return replace(found, message=message)


def _inexact(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in CONTRACTS and CONTRACTS[name].numerics is not Numerics.EXACT]
