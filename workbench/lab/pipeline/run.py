"""`workbench pipeline`: a recipe with a `[pipeline]`, on ranks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from workbench.authoring.author import author
from workbench.authoring.microbatches import cut as microbatches
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import capture
from workbench.lab.pipeline import PipelineSpec
from workbench.lab.pipeline.cut import cut_into_stages
from workbench.lab.pipeline.estimate import Estimate, estimate
from workbench.lab.pipeline.plan import plan
from workbench.lab.pipeline.step import PipelineStep
from workbench.pipeline.progress import Post
from workbench.pipeline.recipe_ranks import WorldChoice, on_ranks, runnable
from workbench.pipeline.run_passes import capture_decompositions, run_joint
from workbench.pipeline.train import Batches, train
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import few
from workbench.tools.command_end import first_rank
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.restoring import shard_of
from workbench.world.mesh import AXES, current_world
from workbench.world.ranks import RankPool


def refuse() -> NoReturn:
    """The kind of step of `training.step = "pipeline"`."""
    raise WorkbenchError('training.step is "pipeline": `workbench pipeline` runs this recipe')


@dataclass
class PipelineReport:
    """Of a run, as rank 0 has it. cut: the stages, as text. passes: of its stages. numerics: against the uncut model;
    None in a fake world.
    """

    cut: str
    estimate: Estimate
    passes: list[str]
    numerics: Verdict | None = None
    losses: tuple[float, ...] = ()


def run_pipeline(
    recipe: Recipe | str,
    *,
    world: WorldChoice | RankPool = "auto",
    timeout: float = 600.0,
) -> PipelineReport:
    """Cut, check, prove and train a recipe that has a `[pipeline]`, on the worlds of `run`, also under torchrun.

    Raises WorkbenchError for what does not fit, before anything is captured.
    """
    recipe = runnable(recipe, world)
    spec: PipelineSpec | None = getattr(recipe, "pipeline", None)
    if spec is None:
        raise WorkbenchError(
            f"recipe {recipe.name!r} has no [pipeline]: add one, or take `workbench run`"
        )
    plan(spec.schedule, spec.multiplies_ranks, spec.count, spec.microbatches).check()
    return on_ranks(recipe, world, _on_rank, timeout=timeout, progress=True)[0]


def _on_rank(recipe: Recipe, post: Post) -> PipelineReport:
    spec: PipelineSpec = vars(recipe)["pipeline"]
    world = replace(current_world(), pipeline=spec.multiplies_ranks)
    sizes = {axis: getattr(recipe.mesh, axis) for axis in AXES}
    whole: Any = world.mesh_of({"pp": world.pipeline, **sizes})
    with deterministic(recipe.training.deterministic):
        authored = author(recipe, world)
        require_modules(authored.module, spec)
        post.stage("capture")
        batch = microbatches(authored.example_batch(), spec.microbatches)[0]
        table = capture_decompositions(recipe.joint_passes)
        joint = capture(authored, decompositions=table, batch=batch, by=recipe.capture)
        run_joint(joint, recipe.joint_passes, progress=post.stage)
        cut = cut_into_stages(joint, spec.stages)
        step = PipelineStep(
            cut, spec.schedule, spec.microbatches, passes=recipe.passes, group=whole.get_group("pp")
        )
        passes = [
            f"stage {stage.number}, {record.name}: {record.outcome}"
            for stage in step.stages
            for record in stage.pair.known.records
        ]
        report = PipelineReport(repr(cut), estimate(cut, step.plan), passes)
        if not world.is_fake:
            post.stage("numerics")
            report.numerics = compare(step, *Batches(authored).at(0))
            post.stage("train")
            report.losses = tuple(train(authored, step, progress=post.step).losses)
    return report


def require_modules(module: nn.Module, spec: PipelineSpec) -> None:
    """Raise WorkbenchError for stages that name no module, and for batch norm."""
    modules, norms = dict(module.named_modules()), (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    starts = () if isinstance(spec.stages, int) else spec.stages
    if unknown := [name for name in starts if name not in modules]:
        raise WorkbenchError(f"pipeline.stages: the model has no module {unknown[0]!r}")
    for name, part in modules.items():
        if isinstance(part, norms) and spec.microbatches > 1:
            raise WorkbenchError(f"pipeline: batch norm {name!r} would see a microbatch: replace it")


def compare(step: PipelineStep, *batch: Any) -> Verdict:
    """One step against the uncut model, bitwise: its gradients of microbatches are summed in order, and then reduced.

    Every rank calls it. Leaves no gradients.
    """
    alone, _ = dist.new_subgroups(1)
    uncut = PipelineStep(cut_into_stages(step.cut.of, []), "GPipe", step.count, group=alone)
    names, results = ["the loss", *step.trained], []
    for one in (uncut, step):
        step.module.zero_grad()
        loss, gradients = one(*batch).detach(), [p.grad for p in step.trained.values()]
        results.append([loss, *(shard_of(g) for g in gradients if g is not None)])
    step.module.zero_grad()
    rows = zip(names, *results, strict=True)
    if odd := [name for name, left, right in rows if not torch.equal(left, right)]:
        return Verdict("numerics", Outcome.FAIL, f"{few(odd, 3)} differ from the uncut model's")
    text = f"loss and {len(step.trained)} gradients are bitwise the uncut model's"
    return Verdict("numerics", Outcome.PASS, text)


def command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench pipeline`."""
    report = run_pipeline(recipe, world=args.world)
    if first_rank():
        lines = report.cut, report.estimate, *report.passes, report.numerics, report.losses
        print(*lines, sep="\n")
    return int(report.numerics is not None and report.numerics.outcome is not Outcome.PASS)
