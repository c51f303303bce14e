"""`run_artifact`: train from a compiled step on all of its ranks, without capture or compilation, and report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from workbench.authoring.author import author
from workbench.checks.collectives import gathered
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.pipeline.checkpoints import check_saving
from workbench.pipeline.progress import Post, Progress
from workbench.pipeline.recipe_ranks import on_ranks, ranks_there
from workbench.pipeline.report import Report
from workbench.pipeline.report_data import PassRow, Peak
from workbench.pipeline.roofline import matmul_ceiling
from workbench.pipeline.run import RankResult, pass_row, report_of
from workbench.pipeline.train import deterministic, train
from workbench.recipe.contracts import Numerics, Stage
from workbench.recipe.recipe import Recipe, diff_recipes, parse_recipe
from workbench.recipe.wording import counted, mesh_text
from workbench.tools.export.artifact import KERNELS, Manifest, made_of, read, require_same
from workbench.tools.export.compiled import Backend, transform
from workbench.tools.export.loaded import load_step
from workbench.torch_api.inductor.carried import import_runtime
from workbench.world.mesh import current_world
from workbench.world.ranks import RankPool

_ON = {"gloo": "CPUs", "nccl": "GPUs"}
LATER = ("training.steps", "training.lr", "training.read_loss_every", "data.path")
"""The keys of a recipe that its compiled step does not depend on."""
NOT_RUN = "an artifact has no graph to compare with: run the recipe at level full"


def run_artifact(
    folder: Path | str,
    *,
    world: RankPool | None = None,
    changes: Mapping[str, Any] | None = None,
    timeout: float = 600.0,
    checkpoints: Path | str | None = None,
    save_every: int | None = None,
    verify: bool = False,
    progress: Progress = True,
) -> Report:
    """Train the recipe of an artifact, and report; the verdicts on its passes are those of its compilation.

    world: a pool to use, or None for new ranks, or torchrun's. changes: values of the recipe by key, of LATER.
    A model or pass of the user's own must be registered, as it was. verify: each rank captures and transforms the
    recipe itself too, and compares its graphs with those that the artifact was lowered from. The rest is as for `run`.

    Runs the artifact's code as Python: only run what you trust. Raises WorkbenchError for an artifact that is damaged
    or was made of or for something else, naming the difference, before any of its code is run.
    """
    began, folder = time.perf_counter(), Path(folder).absolute()
    manifest = read(folder)
    kind: Backend = manifest.world  # type: ignore[assignment]
    if world is not None and world.backend != kind:
        raise WorkbenchError(f"artifact {folder} is compiled for {_ON[kind]}, and this pool has {world.backend}: give "
                             f'ranks(n, backend="{kind}")')
    recipe = _recipe(manifest, folder, changes or {})
    require_same(manifest, made_of(recipe, kind), folder)
    _require_size(recipe, folder, ranks_there(world or kind))
    check_saving(recipe, checkpoints, save_every)
    kept = Path(checkpoints).absolute() if checkpoints is not None else None
    here, results = on_ranks(recipe, world or kind, _on_rank, folder, (kept, save_every), verify, timeout=timeout,
                             progress=progress, began=began)
    return report_of(recipe, here, "light when it was compiled", results)


def _recipe(manifest: Manifest, folder: Path, changes: Mapping[str, Any]) -> Recipe:
    recipe = parse_recipe(manifest.recipe, f"artifact {folder}")
    changed = recipe.override(changes)
    wrong = [f"{key} was {'unset' if was is None else was} and is {'unset' if now is None else now} here"
             for key, was, now in diff_recipes(recipe, changed) if key not in LATER]
    if wrong:
        raise WorkbenchError(f"artifact {folder}: {'; '.join(wrong)}: compile the recipe again, or change "
                             f"{', '.join(LATER)} alone")
    return changed


def _require_size(recipe: Recipe, folder: Path, found: int | None) -> None:
    """Raise WorkbenchError where there are ranks already, and not as many as the artifact is for."""
    size = recipe.mesh.world_size
    if found is not None and found != size:
        raise WorkbenchError(f"artifact {folder} is compiled for {mesh_text(recipe.mesh.axes)}, and there "
                             f"{'is' if found == 1 else 'are'} {counted(found, 'rank')}: start {size}, or compile the "
                             f"recipe again for {found}")


def _on_rank(recipe: Recipe, folder: Path, saving: tuple[Path | None, int | None], verify: bool,
             post: Post) -> RankResult:
    """One rank's part: every rank calls it."""
    world, seconds = current_world(), dict[str, float]()
    manifest = read(folder)
    found = gathered(manifest.fingerprint)
    odd = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    if odd is not None:
        raise WorkbenchError(f"artifact {folder}: rank {odd} reads another artifact there than rank 0: copy one to all "
                             "machines")
    if verify:
        post.stage("verify")
        _verify(recipe, folder, manifest)
    with _timed("import", post, seconds):
        if (folder / KERNELS).exists():
            import_runtime()
    with _timed("author", post, seconds):
        authored = author(recipe, world)
    with _timed("load", post, seconds):
        step, records = load_step(authored, folder, manifest)
    post.stage("train")
    training = train(authored, step, progress=post.step, folder=saving[0], save_every=saving[1])
    step.close()
    program = manifest.programs[manifest.ranks[world.rank]]
    own = iter(records)  # of the replay passes, which ran here
    rows = [pass_row(next(own), recipe) if row.stage is Stage.REPLAY else row
            for row in map(_row, manifest.passes)]
    pipeline = [_verdict(each) for each in manifest.pipeline]
    ceiling = matmul_ceiling(world, getattr(torch, recipe.precision.param))
    return RankResult(rows, _verdict(manifest.schedule), pipeline, seconds, program["step"]["saved_bytes"],
                      program["step"]["flop"], training, ceiling, None, Peak(None, training.peak_bytes), NOT_RUN,
                      post.start)


@contextlib.contextmanager
def _timed(stage: str, post: Post, seconds: dict[str, float]) -> Iterator[None]:
    post.stage(stage)
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started


def _verify(recipe: Recipe, folder: Path, manifest: Manifest) -> None:
    """Raise WorkbenchError on every rank where one rank's own graphs are not those of the artifact."""
    world = current_world()
    with deterministic(recipe.training.deterministic):
        mine = transform(recipe, world).digest
    same = gathered(mine == manifest.programs[manifest.ranks[world.rank]]["graphs"])
    if not all(same):
        raise WorkbenchError(f"artifact {folder}: rank {same.index(False)} captures other graphs here than those that "
                             "the artifact was made of: compile the recipe again, here")


def _row(data: dict[str, Any]) -> PassRow:
    return PassRow(**{**data, "stage": Stage(data["stage"]), "numerics": Numerics(data["numerics"]),
                      "verdicts": [_verdict(each) for each in data["verdicts"]]})


def _verdict(data: dict[str, Any]) -> Verdict:
    return Verdict(**{**data, "outcome": Outcome(data["outcome"])})
