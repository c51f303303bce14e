"""`compile_recipe`: the program of each rank, from one process. `run_artifact`: train from them on all ranks."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.authoring.author import author
from workbench.checks.agreement import difference, schedule
from workbench.checks.record import step_verdicts
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.facts import facts_of
from workbench.graph.read.cost import step_flop
from workbench.lab.artifacts import folder as files
from workbench.lab.artifacts import program as programs
from workbench.lab.artifacts.folder import Backend, Manifest, made_of, new_folder, read_manifest, require_same
from workbench.lab.artifacts.program import digests, load_step, lower, name_groups, read_program
from workbench.pipeline.build import check_buildable, refuse_no_effect
from workbench.pipeline.machine import gpus
from workbench.pipeline.progress import Post, Progress, Teller, telling
from workbench.pipeline.recipe_ranks import on_ranks
from workbench.pipeline.report import PassRow, Report
from workbench.pipeline.run import merged, rank_report
from workbench.pipeline.run_passes import each_no_effect
from workbench.pipeline.stages import Split, before_lowering
from workbench.pipeline.train import check_saving, train
from workbench.recipe.files import writable
from workbench.recipe.recipe import Recipe, diff_recipes, parse_recipe
from workbench.recipe.wording import counted, json_text
from workbench.tools.command_end import PASSED, first_rank, tell_report
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor.carried import install_kernels, kernels_kept, rebuild
from workbench.world.fake import fake_world
from workbench.world.mesh import World, all_gather_object, current_world
from workbench.world.ranks import RankPool, resolve

LATER = ("training.steps", "training.lr", "training.read_loss_every", "data.path")
"""The keys of a recipe that its compiled step does not depend on."""
NOT_RUN = "an artifact's graphs are not compared: run the recipe at level full"


def compile_command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench compile`."""
    manifest = compile_recipe(recipe, args.out, world=args.world)
    ranks, lowered = len(manifest.ranks), len(manifest.programs)
    print(f"{args.out}: the step of {counted(ranks, 'rank')} as {counted(lowered, 'program')}, and "
          f"its verdicts\nworkbench run-artifact {args.out}")
    return PASSED


def compile_recipe(recipe: Recipe, out: Path | str, *, world: Backend | Literal["auto"] = "auto",
                   progress: Progress = True) -> Manifest:
    """Write the compiled step of every rank of `recipe` to the new folder `out`; returns its manifest.

    world: what the ranks will be, "nccl" for GPUs; "auto" takes it where this process has a GPU. Nothing is trained,
    and no rank is started. Each rank's graphs are captured as on the rank itself; equal ones are lowered once.
    Raises WorkbenchError where `out` exists, the ranks' collectives differ, a strict recipe's pass has no effect, or
    something cannot be written to a file.
    """
    by_gpus: Backend = "nccl" if gpus() else "gloo"
    kind = by_gpus if world == "auto" else world
    resolve(kind, 1)
    check_buildable(recipe, kind)
    if kind == "nccl" and "async_tensor_parallel" in recipe.pass_names:
        raise WorkbenchError("pass 'async_tensor_parallel' reserves memory that GPUs share, and an "
                             "artifact is compiled on one: drop the pass, or build on the ranks")
    with new_folder(Path(out)) as folder, telling(progress) as tell:
        with kernels_kept(folder / files.KERNELS):
            manifest = _compile(recipe, folder, kind, tell)
        if kind == "nccl" and (folder / files.KERNELS).exists():
            tell("kernels")
            rebuild(folder / files.KERNELS, [sys.executable, "-m", programs.__name__, str(folder)])
        (folder / files.MANIFEST).write_text(json_text(asdict(manifest)), encoding="utf-8")
        return manifest


def _compile(recipe: Recipe, folder: Path, kind: Backend, tell: Teller) -> Manifest:
    size, device = recipe.mesh.world_size, "cuda:0" if kind == "nccl" else "cpu"
    graphs, ranks, schedules, idle = list[list[str]](), list[int](), [], list[dict[str, str]]()
    for rank in range(size):
        with (deterministic(recipe.training.deterministic), fake_world(size, rank, device) as world,
              uncollected()):
            split, groups, flop = transform(recipe, world, tell.of(f"rank {rank} of {size}"))
            idle.append(dict(each_no_effect(split.known.records)))
            schedules.append(schedule(split.graphs))
            digest = digests(split)
            if digest not in graphs:
                tell(f"rank {rank} of {size}: lower")
                buffer = io.BytesIO()
                torch.save(lower(split, groups, flop), buffer)
                (folder / f"program_{len(graphs)}.pt").write_bytes(buffer.getvalue())
                graphs.append(digest)
            ranks.append(graphs.index(digest))
    refuse_no_effect(recipe, idle)
    odd = difference(schedules)
    if odd is not None:
        raise WorkbenchError(f"recipe {recipe.name!r}: {odd[2]}")
    return Manifest(recipe.to_dict(), kind, made_of(recipe, kind), graphs, ranks, len(schedules[0]))


def transform(recipe: Recipe, world: World, progress: Callable[[str], Any] = lambda _: None
              ) -> tuple[Split, list[str], int]:
    """The graphs before any lowering, of this rank of a real world, or of a fake one as if it were real; the names of
    their process groups, as on every rank; and the floating-point operations of one step.
    """
    flop: list[int] = []

    def note(joint: JointGraph) -> None:
        facts_of(joint.graph).world = "nccl" if world.device.type == "cuda" else "gloo"
        flop.append(step_flop(joint.graph, recipe.training.accumulate))

    split = before_lowering(recipe, world, captured=note, progress=progress)
    for record in split.known.records:
        _ = record.verdicts  # read before the groups get other names
    step_verdicts(split.known)
    return split, name_groups(split), flop[0]


def run_command(args: argparse.Namespace) -> int:
    """`workbench run-artifact`."""
    writable(args.json)
    writable(args.html, "--html")
    if first_rank():
        print(f"workbench: running the code in {args.artifact}: run only artifacts that you trust",
              file=sys.stderr)
    report = run_artifact(args.artifact, changes=dict(args.set), timeout=args.timeout, verify=args.verify,
                          checkpoints=args.checkpoints, save_every=args.save_every)
    return tell_report(report, args)


def run_artifact(folder: Path | str, *, world: RankPool | None = None,
                 changes: Mapping[str, Any] | None = None, timeout: float = 600.0,
                 checkpoints: Path | str | None = None, save_every: int | None = None,
                 verify: bool = False, progress: Progress = True) -> Report:
    """Train the recipe of an artifact, and report; the verdicts on its passes are those of its compilation.

    world: a pool to use, or None for new ranks, or torchrun's. changes: values of the recipe by key, of LATER. verify:
    each rank captures the recipe too, and compares its graphs with those that were compiled. The rest is as for `run`.
    A model or pass of the user's own must be registered, as it was. Runs the artifact's code: only run what you trust.
    Raises WorkbenchError for an artifact that is damaged or was made of or for something else, before any code is run.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    compiled = parse_recipe(manifest.recipe, f"artifact {folder}")
    recipe = compiled.override(changes or {})
    refused = [f"{key} was {was} and is {now} here"
               for key, was, now in diff_recipes(compiled, recipe) if key not in LATER]
    if refused:
        raise WorkbenchError(f"artifact {folder}: {'; '.join(refused)}: compile the recipe again, "
                             f"or change {', '.join(LATER)} alone")
    require_same(manifest.made_of, made_of(recipe, manifest.world), folder)
    check_saving(recipe, checkpoints, save_every)
    saving = None if checkpoints is None else Path(checkpoints).absolute()
    return merged(on_ranks(recipe, world or manifest.world, _on_rank, folder, manifest, saving, save_every, verify,
                           timeout=timeout, progress=progress))


def _on_rank(recipe: Recipe, folder: Path, manifest: Manifest, saving: Path | None,
             save_every: int | None, verify: bool, post: Post) -> Report:
    """One rank's part: every rank calls it."""
    world = current_world()
    gpu, number = world.device.index, manifest.ranks[world.rank]
    where = f"artifact {folder}"
    if world.kind != manifest.world:
        raise WorkbenchError(f"{where} is compiled for {manifest.world} ranks, and these are "
                             f"{world.kind}: start others, or compile the recipe again for these")
    if len(set(all_gather_object((folder / files.SUMS).read_text()))) > 1:
        raise WorkbenchError(f"{where}: the ranks read different ones: copy one to all machines")
    if verify:
        post.stage("verify")
        with deterministic(recipe.training.deterministic):
            same = all_gather_object(
                digests(transform(recipe, world)[0]) == manifest.programs[number]
            )
        if not all(same):
            raise WorkbenchError(
                f"{where}: rank {same.index(False)} captures other graphs here than those "
                "that the artifact was made of: compile the recipe again, here"
            )
    started = time.perf_counter()
    post.stage("author")
    authored = author(recipe, world)
    loading = time.perf_counter()
    post.stage("load")
    install_kernels(folder / files.KERNELS, gpu)
    program = read_program(folder / f"program_{number}.pt", gpu)
    step, records = load_step(authored, program)
    seconds = {"author": loading - started, "load": time.perf_counter() - loading}
    post.stage("train")
    training = train(authored, step, progress=post.step, folder=saving, save_every=save_every)
    step.close()
    rows = [*program.rows, *map(PassRow.of, records)]
    outcome = Outcome.PASS if world.size > 1 else Outcome.UNKNOWN
    agreement = Verdict("collectives", outcome, f"{manifest.collectives} collectives in the same "
                        f"order on {counted(world.size, 'rank')}, captured in turn")
    return rank_report(
        recipe, world, training, program.flop, level="light when it was compiled", seconds=seconds, passes=rows,
        schedule=agreement, pipeline=program.pipeline, saved_bytes=program.saved_bytes, peak=None, not_run=NOT_RUN)
