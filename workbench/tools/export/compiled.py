"""`compile_recipe`: capture, transform and lower a recipe as each of its ranks, in one process, and write what runs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from workbench.checks.collectives import difference, schedule
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.graph.facts import facts_of
from workbench.graph.partition import saved_order
from workbench.graph.read.cost import flops
from workbench.pipeline.build import check_buildable, refuse_no_effect
from workbench.pipeline.machine import gpus
from workbench.pipeline.progress import Progress, Teller, telling
from workbench.pipeline.recipe_ranks import refuse_nccl
from workbench.pipeline.route import RouteStage, StepState, route, upto, walk
from workbench.pipeline.run import pass_row
from workbench.pipeline.run_passes import saved_bytes
from workbench.pipeline.train import deterministic
from workbench.recipe.contracts import Stage
from workbench.recipe.recipe import Recipe
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
_WHY = {check: "an artifact is compiled without running anything" for check in ("numerics", "time")} | {
    check: "compiled callables, and no graph to look at" for check in ("lint", "collectives", "memory")}


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
            state, graphs = made.state, made.digest
            entries.append(schedule(state.graphs))
            if graphs not in programs:
                codes = _lowered(made, told)
                files = {code.part: write_code(folder, f"{code.part}_{len(programs)}", code) for code in codes}
                programs[graphs] = {"graphs": graphs, "files": files, "groups": made.groups,
                                    "step": _step(recipe, state)}
            ranks.append([*programs].index(graphs))
            if rank == 0:
                refuse_no_effect(recipe, state.records)
                verdicts = {"passes": [asdict(pass_row(record, recipe, _WHY)) for record in state.records],
                            "pipeline": [verdict.to_json() for verdict in state.joining]}
    if (found := difference(entries)) is not None:
        raise WorkbenchError(f"recipe {recipe.name!r}: {found[2]}")
    same = Verdict("collectives", Outcome.PASS if size > 1 else Outcome.UNKNOWN,
                   f"{len(entries[0])} collectives in the same order on {counted(size, 'rank')}, captured in turn")
    return Manifest(recipe.to_dict(), kind, made_of(recipe, kind), [*programs.values()], ranks,
                    schedule=same.to_json(), **verdicts)


@dataclass(frozen=True)
class Transformed:
    """A recipe's graphs on one rank before any lowering, with process groups named as on every rank.

    left: the stages that lower them. digest: SHA-256 of all that a compiler reads of them.
    """

    state: StepState
    left: list[RouteStage]
    groups: list[str]

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(map(text_of, self.state.graphs)).encode()).hexdigest()


def transform(recipe: Recipe, world: World, told: Callable[[str], Any] = lambda _: None) -> Transformed:
    """Walk the route before any lowering, on this rank of a real world, or of a fake one as if it were real."""
    stages, state = route(recipe, world), StepState()
    captured, until_lowered = upto(stages, Stage.JOINT), upto(stages, Stage.LOWERING)
    walk(stages[:captured], state, progress=told)
    facts_of(state.joint.graph).world = "nccl" if world.device.type == "cuda" else "gloo"
    with state.joint_graph:
        walk(stages[captured:until_lowered], state, progress=told)
    return Transformed(state, stages[until_lowered:-1], rename_groups(state.graphs, state.authored))


def _lowered(made: Transformed, told: Callable[[str], Any]) -> list[Code]:
    """The code of each lowered graph. The replay passes run last, to be refused here if at all; loading does it again.
    """
    state, replay = made.state, upto(made.left, Stage.REPLAY)
    walk(made.left[:replay], state, progress=told)
    bodies = state.bodies or (None,) * len(state.graphs)
    codes = [written_out(graph, body) for graph, body in zip(state.graphs, bodies, strict=True)]
    if state.authored.world.device.type == "cuda" and any(code.kind == "inductor" or code.regions for code in codes):
        run_once(state.graphs, state.bodies or tuple(map(aot.boxed, state.graphs)))
    walk(made.left[replay:], state)
    return codes


def _step(recipe: Recipe, state: StepState) -> dict[str, Any]:
    """What loading needs beside the code, and what a report says of the step."""
    pair = state.forward_backward
    found: dict[str, Any] = {
        "parameters": pair.parameters, "buffers": pair.buffers, "inputs": asdict(pair.inputs),
        "saved_order": saved_order(*pair.graphs), "saved_bytes": saved_bytes(pair),
        "flop": sum(flops(state.captured).values()) * recipe.training.accumulate}
    if hasattr(state, "joined"):
        joined = state.joined
        found["whole"] = {"trained": joined.trained, "update": asdict(joined.update),
                          "microbatches": joined.microbatches}
    return found
