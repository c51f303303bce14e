"""`run`: a recipe from its file to a report, on ranks that are started here, that torchrun started, or on none."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.checks.order import times_of
from workbench.checks.verdicts import Outcome, Verdict, worst
from workbench.errors import WorkbenchError
from workbench.graph.read.cost import step_flop
from workbench.graph.read.peak import StepPeak, step_peak
from workbench.pipeline.build import Built, build
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.measured_run import run_of_kernels
from workbench.pipeline.progress import REPORTS, Post, Progress
from workbench.pipeline.proofs.authoring_proof import check_replicas
from workbench.pipeline.proofs.executed_proof import note_executed
from workbench.pipeline.recipe_ranks import WorldChoice, among_ranks, on_ranks, runnable
from workbench.pipeline.report import Expectation, PassRow, Peak, Report
from workbench.pipeline.roofline import matmul_ceiling, roofline
from workbench.pipeline.run_passes import Level
from workbench.pipeline.step_profile import Kernel, StepProfile, profiled, step_profile
from workbench.pipeline.train import Batches, Training, check_saving, recipe_of, text_of, train
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe
from workbench.torch_api.restoring import restoring_module
from workbench.world.mesh import World, all_gather_object, current_world
from workbench.world.ranks import RankPool


def run(
    recipe: Recipe | str | os.PathLike[str],
    *,
    world: WorldChoice | RankPool = "auto",
    level: Level | None = None,
    timeout: float = 600.0,
    checkpoints: Path | str | None = None,
    save_every: int | None = None,
    progress: Progress = True,
) -> Report:
    """Build `recipe` on every rank, train it, and report what each pass did and proved.

    world: "auto" takes NCCL where there are enough GPUs, else gloo; "fake" builds for one rank of a mesh of any size
    in this process and trains nothing; a pool, `ranks(n)`, is used and stays open. In a process that torchrun started,
    or in a rank, its ranks are used. level: "full", the default where ranks have values, compares two training steps
    with eager, each pass's graph with the one it received, and the model with the plain one; "light" does not. timeout:
    seconds for all of it, a pool's own where one is given. checkpoints: a folder, which all ranks share: the run
    resumes from the newest checkpoint there, and saves one every `save_every` steps and at the end. progress: whether
    to show what runs, or a function to call with each stage's name; WORKBENCH_PROGRESS=0 shows nothing.

    Raises WorkbenchError for what cannot run here, RankError where a rank fails. A strict recipe's pass without effect
    makes the report not `ok`.
    """
    recipe = runnable(recipe, world)
    if world == "fake" and checkpoints is not None:
        raise WorkbenchError(
            f"checkpoints {checkpoints}: a fake world trains nothing: take world gloo or nccl"
        )
    check_saving(recipe, checkpoints, save_every)
    level = level or ("light" if world == "fake" else "full")
    folder = None if checkpoints is None else Path(checkpoints).absolute()
    if world != "fake":
        text_of(recipe)  # what is wrong with it is said before any rank starts
    report = merged(
        on_ranks(
            recipe, world, on_rank, level, folder, save_every, timeout=timeout, progress=progress
        )
    )
    if (world == "fake" or not among_ranks(world)) and os.environ.get(REPORTS):
        _keep(report, Path(os.environ[REPORTS]))
    return report


def _keep(report: Report, folder: Path) -> None:
    path = folder / f"report_{len(list(folder.glob('*.json'))) + 1}_{report.recipe.name}.json"
    report.to_json(path)
    write_whole(path.with_suffix(".txt"), report.table(reasoned=False) + "\n")


def on_rank(
    recipe: Recipe, level: Level, folder: Path | None, save_every: int | None, post: Post
) -> Report:
    """One rank's part of `run`: every rank of the world calls it. folder: that of the checkpoints."""
    world = current_world()
    # a pass without effect is told in the report, which a strict recipe then fails: no rank raises alone
    built = build(
        recipe.model_copy(update={"strict": False}), world, level=level, progress=post.stage
    )
    training = None
    if world.kind in ("gloo", "nccl"):
        post.stage("train")
        training = train(
            built.authored, built.step, progress=post.step, folder=folder, save_every=save_every
        )
        post.stage("measure")
    return _measured(built, recipe, level, training)


def report_here(built: Built, training: Training) -> Report:
    """The report of a step that the ranks of this world have built and trained, as `run` gives it; level light.

    Every rank calls it, once: it closes the step.
    """
    return merged(all_gather_object(_measured(built, recipe_of(built.authored), "light", training)))


def _measured(built: Built, recipe: Recipe, level: Level, training: Training | None) -> Report:
    """This rank's report, once it has trained, with what is measured then. Closes the step."""
    world = built.authored.world
    profile = None
    if training is not None:
        profile = _profiled(built)
        built.step.close()
    not_run = "level light runs no graph: ask for level full" if level == "light" else ""
    if training is None:
        not_run = f"a {world.kind} world has neither values nor speed: run on real ranks"
    return rank_report(
        recipe,
        world,
        training,
        step_flop(built.captured, recipe.training.accumulate),
        level=level,
        seconds=built.seconds,
        passes=[PassRow.of(record) for record in built.records],
        schedule=built.schedule,
        pipeline=built.pipeline,
        saved_bytes=built.saved_bytes,
        profile=profile,
        not_run=not_run,
        peak=predicted_peak(built),
    )


def rank_report(
    recipe: Recipe,
    world: World,
    training: Training | None,
    flop: int,
    *,
    peak: StepPeak | None,
    saved_bytes: int,
    **more: Any,
) -> Report:
    """What one rank reports. Every rank calls it: it measures how fast they multiply. flop: of this rank's step.
    more: the other fields of the report.
    """
    dtype = recipe.precision.param
    tokens = recipe.data.seq_len * recipe.data.batch_per_rank * recipe.mesh.dp
    ceiling = None if training is None else matmul_ceiling(world, getattr(torch, dtype))
    measured = None if training is None else training.peak_bytes
    reason = f"a {world.kind} world runs nothing: no ceiling to measure" if ceiling is None else ""
    return Report(
        recipe=recipe,
        world={"kind": world.kind, "size": world.size, "axes": dict(recipe.mesh.axes)},
        machine=machine(),
        versions=versions(),
        training=training,
        saved_bytes=saved_bytes,
        roofline=roofline(flop / tokens, dtype, tokens, ceiling, None, reason),
        peak=Peak(peak, measured),
        expectations=check_expectations(recipe, training, saved_bytes),
        **more,
    )


def _profiled(built: Built) -> StepProfile | None:
    """Note what one step ran, for the verdicts: on a GPU by one profile, which is returned."""
    module, step, batch = built.authored.module, built.step, Batches(built.authored).first()

    def once() -> None:
        # to none: a replayed step refuses to write over gradients that are held
        module.zero_grad(set_to_none=True)
        step.once(*batch)

    with restoring_module(module, step.written):
        kernels, launches = None, None
        if built.authored.world.device.type == "cuda":
            kernels, launches = profiled(once)
        else:
            note_executed(built.known, once)
        if built.known.authoring is None:
            if built.known.ran is None and kernels is None:
                once()
            built.known.authoring = check_replicas(built.authored, step.optimizer)
    if kernels is None or launches is None:
        return None
    note_kernels(built, kernels)
    return step_profile(kernels, launches)


def note_kernels(built: Built, kernels: Sequence[Kernel]) -> None:
    """Note which kernels one step ran, and how they kept the order that a pass chose. Every rank calls it."""
    split = built.step.split
    built.known.ran = Counter(kernel.name for kernel in kernels)
    order = split.facts.order
    if any(all_gather_object(order is not None and bool(order.hidden))):  # local shapes may differ
        ran = run_of_kernels(kernels, split.by_part, f"measured on {torch.cuda.get_device_name()}")
        times = all_gather_object(times_of(ran))
        if order is not None and order.hidden:
            built.known.profile = order, ran, times


def predicted_peak(built: Built) -> StepPeak:
    """The step's peak, by the graphs as the last pass left them."""
    return peak_by(built.step.split.graphs, [record.name for record in built.records])


def peak_by(
    graphs: tuple[GraphModule, ...], passes: Sequence[str], *, gpu: bool = False
) -> StepPeak:
    """The peak of a step of these graphs, which lowering and replay passes among `passes` will run."""
    return step_peak(
        graphs, fused="full_inductor_compilation" in passes, replayed="cudagraph" in passes, gpu=gpu
    )


def merged(ranks: Sequence[Report]) -> Report:
    """One report of those of all ranks, or of one rank of a fake world: the others of its mesh hold as much."""
    first = ranks[0]
    size, tokens = first.world["size"], first.training.tokens_per_step if first.training else 1
    flop = sum(rank.roofline.flop_per_token for rank in ranks) * size / len(ranks)
    peaks = [rank.peak.measured for rank in ranks if rank.peak and rank.peak.measured is not None]
    return replace(
        first,
        machine=first.machine | ({"peak_bytes_by_rank": peaks} if peaks else {}),
        passes=merge_rows([rank.passes for rank in ranks]),
        schedule=gravest_rank([rank.schedule for rank in ranks]),
        pipeline=[
            gravest_rank(same) for same in zip(*(rank.pipeline for rank in ranks), strict=True)
        ],
        roofline=roofline(
            flop,
            first.roofline.dtype,
            tokens,
            first.roofline.ceiling,
            first.step_seconds,
            first.roofline.reason,
        ),
    )


def gravest_rank(ranks: Sequence[Verdict]) -> Verdict:
    """One verdict for all ranks: rank 0's where it is the gravest, otherwise the gravest, with its rank.

    NO_EFFECT counts where no rank had an effect.
    """
    gravest = worst([v for v in ranks if v.outcome is not Outcome.NO_EFFECT] or ranks)
    if ranks[0].outcome is gravest:
        return ranks[0]
    rank = next(i for i, verdict in enumerate(ranks) if verdict.outcome is gravest)
    message = ": ".join(filter(None, (f"rank {rank}", ranks[rank].message)))
    return replace(ranks[rank], message=message)


def merge_rows(ranks: Sequence[Sequence[PassRow]]) -> list[PassRow]:
    """The ranks' rows as one list; ranks ran the same passes, or the schedules would have differed."""
    rows = []
    for same in zip(*ranks, strict=True):
        checks = zip(*(row.verdicts for row in same), strict=True)
        rows.append(replace(same[0], verdicts=[gravest_rank(verdicts) for verdicts in checks]))
    return rows


def check_expectations(
    recipe: Recipe, training: Training | None, saved_bytes: int
) -> list[Expectation]:
    """What the recipe expects beside the passes' contracts. The loss falls if the last fifth is below the first."""
    expectations = []
    if recipe.expect.loss_falls:
        losses = training.losses if training is not None else []
        if len(losses) < 2:
            why = (
                "one step has no course: set training.steps to 2"
                if losses
                else "a fake world trains nothing"
            )
            expectations.append(Expectation("loss_falls", Outcome.UNKNOWN, why))
        else:
            part = max(1, len(losses) // 5)
            first, last = statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])
            outcome = Outcome.PASS if last < first else Outcome.FAIL
            expectations.append(
                Expectation("loss_falls", outcome, f"from {first:.4f} to {last:.4f}")
            )
    limit = recipe.expect.max_saved_bytes
    if limit is not None:
        outcome = Outcome.PASS if saved_bytes <= limit else Outcome.FAIL
        message = f"{saved_bytes:,} bytes saved, at most {limit:,}"
        expectations.append(Expectation("max_saved_bytes", outcome, message))
    return expectations
