"""`compile_recipe`: capture, transform and lower a recipe as each of its ranks, in one process, and write what runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule

from workbench.checks.collectives import difference, schedule
from workbench.checks.record import step_verdicts
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.facts import facts_of
from workbench.graph.partition import ForwardBackward, saved_order
from workbench.graph.read.cost import flops
from workbench.graph.step_graph import StepGraph
from workbench.pipeline.build import check_buildable, refuse_no_effect
from workbench.pipeline.machine import gpus
from workbench.pipeline.progress import Progress, Teller, telling
from workbench.pipeline.recipe_ranks import refuse_nccl
from workbench.pipeline.run import pass_row
from workbench.pipeline.run_passes import run_partitioned, saved_bytes
from workbench.pipeline.stages import Split, before_lowering, pair_of, passes_before
from workbench.pipeline.train import deterministic
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
from workbench.recipe.sections import PassSpec
from workbench.recipe.wording import counted
from workbench.tools.export import load_once
from workbench.tools.export.artifact import KERNELS, Manifest, made_of, new_folder, seal, write_code
from workbench.tools.export.code import Code, text_of, written_out
from workbench.tools.export.groups import rename_groups
from workbench.tools.export.run_once import run_once
from workbench.torch_api import aot
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor.carried import kernels_kept, rebuild
from workbench.world.fake import fake_world
from workbench.world.mesh import World

Backend = Literal["gloo", "nccl"]
SYMMETRIC = "async_tensor_parallel"
_DEVICE = {"gloo": "cpu", "nccl": "cuda:0"}
MOST = 256
"""The most ranks: each is captured, one after the other."""


def compile_recipe(
    recipe: Recipe, out: Path | str, *, world: Literal["auto", "gloo", "nccl"] = "auto",
    progress: Progress = True,
) -> Manifest:
    """Write the compiled step of every rank of `recipe` to the new folder `out`; returns its manifest.

    world: what the ranks will be, "nccl" for GPUs; "auto" takes it where this process has a GPU. Nothing is trained,
    and no other rank is started. Each rank's graphs are captured and transformed as on the rank itself; graphs that are
    equal on several ranks are lowered once. On a GPU, what Inductor wrote also runs once, on zeros and without other
    ranks: so each kernel is built, and its launch configuration chosen.

    Raises WorkbenchError where `out` exists, the ranks' collectives differ, a strict recipe's pass has no effect, or
    something cannot be written to a file.
    """
    kind: Backend = world if world != "auto" else "nccl" if gpus() else "gloo"
    if kind == "nccl":
        refuse_nccl(1)
    out, size = Path(out), recipe.mesh.world_size
    if size > MOST:
        raise WorkbenchError(f"recipe {recipe.name!r} has {size} ranks, and at most {MOST} are compiled, one after the "
                             "other: make the mesh smaller")
    check_buildable(recipe, kind)
    if kind == "nccl" and SYMMETRIC in recipe.pass_names:
        raise WorkbenchError(f"pass {SYMMETRIC!r} reserves memory that GPUs share, and an artifact is compiled on one "
                             "GPU: drop the pass, or build on the ranks")
    with new_folder(out) as folder, telling(progress) as tell:
        with kernels_kept(folder / KERNELS):
            manifest = _compile(recipe, folder, kind, tell)
        if kind == "nccl" and (folder / KERNELS).exists():
            tell("kernels")
            rebuild(folder / KERNELS, [sys.executable, "-m", load_once.__name__, str(folder)])
        return seal(folder, manifest)


def _compile(recipe: Recipe, folder: Path, kind: Backend, tell: Teller) -> Manifest:
    size, programs = recipe.mesh.world_size, dict[str, dict[str, Any]]()
    ranks, entries, verdicts = [], [], dict[str, Any]()
    for rank in range(size):
        told = tell.of(f"rank {rank} of {size}")
        with (deterministic(recipe.training.deterministic), fake_world(size, rank, _DEVICE[kind]) as world,
              uncollected()):
            made = transform(recipe, world, told)
            graphs, known = made.digest, made.split.known
            entries.append(schedule(made.split.graphs))
            if graphs not in programs:
                codes = _lowered(made, told)
                files = {code.part: write_code(folder, f"{code.part}_{len(programs)}", code) for code in codes}
                programs[graphs] = {"graphs": graphs, "files": files, "groups": made.groups,
                                    "step": _step(recipe, made)}
            ranks.append([*programs].index(graphs))
            if rank == 0:
                refuse_no_effect(recipe, known.records)
                verdicts = {"passes": [asdict(pass_row(record, recipe)) for record in known.records],
                            "pipeline": [verdict.to_json() for verdict in step_verdicts(known)]}
    if (found := difference(entries)) is not None:
        raise WorkbenchError(f"recipe {recipe.name!r}: {found[2]}")
    same = Verdict("collectives", Outcome.PASS if size > 1 else Outcome.UNKNOWN,
                   f"{len(entries[0])} collectives in the same order on {counted(size, 'rank')}, captured in turn")
    return Manifest(recipe.to_dict(), kind, made_of(recipe, kind), [*programs.values()], ranks,
                    schedule=same.to_json(), **verdicts)


@dataclass(frozen=True)
class Transformed:
    """A recipe's graphs on one rank before any lowering, with process groups named as on every rank.

    captured: the joint graph before its first pass. left: the passes that lower them. digest: SHA-256 of all that a
    compiler reads of them.
    """

    captured: GraphModule
    split: Split
    left: list[PassSpec]
    groups: list[str]

    @property
    def pair(self) -> ForwardBackward:
        return pair_of(self.split)

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(text_of, self.split.graphs)).encode()).hexdigest()


def transform(recipe: Recipe, world: World, told: Callable[[str], Any] = lambda _: None) -> Transformed:
    """The recipe's graphs before any lowering, on this rank of a real world, or of a fake one as if it were real."""
    kind = "nccl" if world.device.type == "cuda" else "gloo"
    captured: list[GraphModule] = []

    def note(joint: JointGraph) -> None:
        facts_of(joint.graph).world = kind
        captured.append(joint.graph)

    split = before_lowering(recipe, world, captured=note, progress=told)
    for record in split.known.records:
        _ = record.verdicts  # read before the groups get other names
    step_verdicts(split.known)
    left = recipe.passes[len(passes_before(recipe.passes, (Stage.LOWERING, Stage.REPLAY))):]
    return Transformed(captured[0], split, list(left), rename_groups(split.graphs, pair_of(split).authored))


def _lowered(made: Transformed, told: Callable[[str], Any]) -> list[Code]:
    """The code of each lowered graph. The replay passes run last, to be refused here if at all; loading does it again.
    """
    split, lowering = made.split, passes_before(made.left, (Stage.REPLAY,))
    run_partitioned(split, lowering, progress=told)
    lowered = split.known.bodies
    bodies = lowered or (None,) * len(split.graphs)
    codes = [written_out(graph, body) for graph, body in zip(split.graphs, bodies, strict=True)]
    compiled = any(code.kind == "inductor" or code.regions for code in codes)
    if compiled and made.pair.authored.world.device.type == "cuda":
        run_once(split.graphs, lowered or tuple(map(aot.boxed, split.graphs)))
    run_partitioned(split, made.left[len(lowering):])
    return codes


def _step(recipe: Recipe, made: Transformed) -> dict[str, Any]:
    """What loading needs beside the code, and what a report says of the step."""
    pair = made.pair
    found: dict[str, Any] = {
        "parameters": pair.parameters, "buffers": pair.buffers, "inputs": asdict(pair.inputs),
        "saved_order": saved_order(*pair.graphs), "saved_bytes": saved_bytes(pair),
        "flop": sum(flops(made.captured).values()) * recipe.training.accumulate}
    if isinstance(joined := made.split, StepGraph):
        found["whole"] = {"trained": joined.trained, "update": asdict(joined.update),
                          "microbatches": joined.microbatches}
    return found
