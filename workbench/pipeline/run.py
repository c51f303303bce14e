"""`run`: a recipe from its file to a report, on ranks that are started here, that torchrun started, or on none."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from workbench.checks.collectives import gathered
from workbench.checks.order import times_of
from workbench.checks.verdicts import Verdict
from workbench.errors import WorkbenchError
from workbench.graph.read.peak import StepPeak, step_peak
from workbench.pipeline.build import Built, build
from workbench.pipeline.machine import machine, versions
from workbench.pipeline.measured_run import measured
from workbench.pipeline.progress import REPORTS, Post, Progress
from workbench.pipeline.proofs.executed_proof import note_executed
from workbench.pipeline.proofs.time_proof import time_graphs
from workbench.pipeline.recipe_ranks import WorldChoice, among_ranks, on_ranks, runnable
from workbench.pipeline.report import Report, check_expectations, gravest_rank, merge_rows
from workbench.pipeline.report_data import PassRow, Peak, median_step
from workbench.pipeline.roofline import matmul_ceiling, roofline
from workbench.pipeline.run_passes import Level, PassRecord
from workbench.pipeline.step_profile import StepProfile, profile_step
from workbench.pipeline.text_data import load_text
from workbench.pipeline.train import Batches, Training, check_saving, recipe_of, train
from workbench.recipe.files import write_whole
from workbench.recipe.recipe import Recipe
from workbench.torch_api.restoring import restoring_module
from workbench.world.mesh import World, current_world
from workbench.world.ranks import RankPool

LIGHT = "level light runs no graph: ask for level full"


@dataclass
class RankResult:
    """What one rank sends back: plain data, no graphs."""

    rows: list[PassRow]
    schedule: Verdict
    pipeline: list[Verdict]
    seconds: dict[str, float]
    saved_bytes: int
    flop: int
    training: Training | None
    ceiling: float | None
    profile: StepProfile | None
    peak: Peak | None = None
    not_run: str = ""
    start: tuple[float, float] | None = None


def run(
    recipe: Recipe | str | os.PathLike[str],
    *,
    world: WorldChoice | RankPool = "auto",
    level: Level = "light",
    timeout: float = 600.0,
    checkpoints: Path | str | None = None,
    save_every: int | None = None,
    progress: Progress = True,
) -> Report:
    """Build `recipe` on every rank, train it, and report what each pass did and proved.

    world: "auto" takes NCCL where there are enough GPUs, else gloo; "fake" builds for one rank of a mesh of any size
    in this process and trains nothing; a pool, `ranks(n)`, is used and stays open. In a process that torchrun started,
    or in a rank, its ranks are used. level: "full" also runs each pass's graph against the one it received. timeout:
    seconds for all of it, a pool's own where one is given. checkpoints: a folder, which all ranks share: the run
    resumes from the newest checkpoint there, and saves one every `save_every` steps and at the end. progress: whether
    to show what runs, or a function to call with each stage's name; WORKBENCH_PROGRESS=0 shows nothing.

    Raises WorkbenchError for what cannot run here, RankError where a rank fails. A strict recipe's pass without effect
    makes the report not `ok`.
    """
    began = time.perf_counter()
    recipe = runnable(recipe, world)
    if world == "fake" and checkpoints is not None:
        raise WorkbenchError(
            f"checkpoints {checkpoints}: a fake world trains nothing: take world gloo or nccl"
        )
    check_saving(recipe, checkpoints, save_every)
    folder = None if checkpoints is None else Path(checkpoints).absolute()
    if world != "fake":
        load_text(
            recipe.data.path,
            seq_len=recipe.data.seq_len,
            vocab_size=int(recipe.model.sizes()["vocab_size"]),
        )
    here, results = on_ranks(recipe, world, on_rank, level, folder, save_every, timeout=timeout,
                             progress=progress, began=began)
    report = report_of(recipe, here, level, results)
    return report if world != "fake" and among_ranks(world) else _kept(report)


def _start(ranks: list[tuple[float, float]]) -> float | None:
    """Seconds of the slowest rank. Joining counts for the rank that came last, for which the others waited."""
    return (
        min(joining for joining, _ in ranks) + max(later for _, later in ranks) if ranks else None
    )


def _kept(report: Report) -> Report:
    folder = os.environ.get(REPORTS)
    if folder:
        number = len(list(Path(folder).glob("*.json"))) + 1
        path = Path(folder) / f"report_{number}_{report.recipe.name}.json"
        report.to_json(path)
        write_whole(path.with_suffix(".txt"), report.table(reasoned=False) + "\n")
    return report


def on_rank(
    recipe: Recipe, level: Level, folder: Path | None, save_every: int | None, post: Post
) -> RankResult:
    """One rank's part of `run`: every rank of the world calls it. folder: that of the checkpoints."""
    world = current_world()
    # a pass without effect is told in the report, which a strict recipe then fails: no rank raises alone
    built = build(
        recipe.model_copy(update={"strict": False}), world, level=level, progress=post.stage
    )
    training = None
    if world.kind in ("gloo", "nccl"):
        if level == "full":
            post.stage("time")
            time_graphs(built.records, built.step)
        post.stage("train")
        training = train(
            built.authored, built.step, progress=post.step, folder=folder, save_every=save_every
        )
        post.stage("measure")
    return replace(_result(built, recipe, level, training), start=post.start)


def report_here(built: Built, training: Training) -> Report:
    """The report of a step that the ranks of this world have built and trained, as `run` gives it; level light.

    Every rank calls it, once: it closes the step.
    """
    recipe = recipe_of(built.authored)
    results = gathered(_result(built, recipe, "light", training))
    return report_of(recipe, built.authored.world, "light", results)


def _result(built: Built, recipe: Recipe, level: Level, training: Training | None) -> RankResult:
    """What this rank has to say, once it has trained, and what is measured then. Closes the step."""
    world = built.authored.world
    ceiling, profile = None, None
    peak = Peak(predicted_peak(built), training.peak_bytes if training is not None else None)
    if training is not None:
        once = partial(_once, built, Batches(built.authored).first())
        with restoring_module(built.authored.module, built.step.written):
            note_executed(built.known, once)
        if world.device.type == "cuda":
            profile = profile_step(once, built.authored.module, built.step.written)
            _profile_order(built, once)
        built.step.close()
        ceiling = matmul_ceiling(world, getattr(torch, recipe.precision.param))
    rows = [pass_row(record, recipe) for record in built.records]
    return RankResult(rows, built.schedule, built.pipeline, built.seconds, built.saved_bytes, built.flop, training,
                      ceiling, profile, peak, _why_not_run(world, level))


def _once(built: Built, batch: tuple[Any, ...]) -> None:
    # a replayed step refuses to write over gradients that are held
    built.authored.module.zero_grad(set_to_none=True)
    built.step.once(*batch)


def _profile_order(built: Built, once: Callable[[], None]) -> None:
    """Profile a step on this rank's GPU, where a pass has hidden collectives behind compute."""
    chosen = built.step.split.facts.order
    asked = chosen is not None and bool(chosen.hidden)
    if any(gathered(asked)):  # local shapes may differ, and a step has collectives
        ran = measured(once, built.step)
        times = gathered(times_of(ran))
        if chosen is not None and asked:
            built.known.profile = chosen, ran, times


def _why_not_run(world: World, level: Level) -> str:
    """Why the graphs before and after a pass were neither compared nor timed; "" where they were."""
    if world.kind not in ("gloo", "nccl"):
        return f"a {world.kind} world has neither values nor speed: run on real ranks"
    return LIGHT if level == "light" else ""


def pass_row(record: PassRecord, recipe: Recipe) -> PassRow:
    """What a report says of one pass."""
    contract, verdicts = record.item.contract, record.verdicts
    return PassRow(record.name, record.stage, contract.numerics, contract.tolerance, record.seconds,
                   record.verify_seconds, verdicts, record.name in recipe.expect.no_effect, record.memory,
                   record.ran_for)


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


def report_of(recipe: Recipe, world: World, level: str, results: list[RankResult]) -> Report:
    """The report of what each rank of `world` has sent back."""
    first = results[0]
    tokens = recipe.data.seq_len * recipe.data.batch_per_rank * recipe.mesh.dp
    # a fake world builds one rank: the others of its mesh hold as much
    flop = sum(r.flop for r in results) if len(results) == world.size else first.flop * world.size
    reason = (
        ""
        if first.ceiling is not None
        else f"a {world.kind} world runs nothing: no ceiling to measure"
    )
    peaks = [
        r.training.peak_bytes for r in results if r.training and r.training.peak_bytes is not None
    ]
    pipeline = [gravest_rank(same) for same in zip(*(r.pipeline for r in results), strict=True)]
    return Report(
        recipe=recipe,
        world={"kind": world.kind, "size": world.size, "axes": dict(recipe.mesh.axes)},
        level=level,
        machine=machine() | ({"peak_bytes_by_rank": peaks} if peaks else {}),
        versions=versions(),
        seconds=first.seconds,
        start_seconds=_start([r.start for r in results if r.start is not None]),
        passes=merge_rows([r.rows for r in results]),
        schedule=gravest_rank([r.schedule for r in results]),
        pipeline=pipeline,
        roofline=roofline(flop / tokens, recipe.precision.param, tokens, first.ceiling, median_step(first.training),
                          reason),
        saved_bytes=first.saved_bytes,
        training=first.training,
        profile=first.profile,
        peak=first.peak,
        not_run=first.not_run,
        expectations=check_expectations(recipe, first.training, first.saved_bytes),
    )
