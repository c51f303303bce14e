"""`bisect`: build a recipe on its ranks, and find the first pass that fails a check, and the node where it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from workbench.checks import numerics
from workbench.checks.bisect import CHECKS, Bisection, Found, first_growth, first_node, first_told, over_ranks
from workbench.checks.collectives import gathered
from workbench.checks.values import Trace, trace
from workbench.checks.verdicts import Outcome
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.callables import graph_of
from workbench.graph.capture import JointGraph
from workbench.graph.lower import compile_step
from workbench.graph.partition import saved_order
from workbench.pipeline.build import Built, build
from workbench.pipeline.progress import Post, Progress
from workbench.pipeline.proofs.numerics_proof import (
    compare_graphs,
    group_size,
    real_inputs,
    revealing,
    run_graphs,
    written_inputs,
)
from workbench.pipeline.recipe_ranks import WorldChoice, among_ranks, on_ranks, runnable
from workbench.pipeline.run_passes import PassRecord
from workbench.pipeline.stages import divide
from workbench.pipeline.train import deterministic
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import first_line
from workbench.world.mesh import current_world
from workbench.world.ranks import RankPool

Check = Literal["all", "numerics", "memory", "no_effect"]
LIGHT = ("lint", "effect", "collectives")


def bisect(
    recipe: Recipe | str | os.PathLike[str],
    check: Check = "all",
    *,
    world: WorldChoice | RankPool = "auto",
    timeout: float = 600.0,
    progress: Progress = True,
) -> Bisection:
    """Build `recipe` on every rank, and find the first pass that fails `check`, and the first node in its graphs.

    check: "numerics", each pass against the graph it received, on the same inputs, rank by rank; "memory", a higher
    estimate than before the pass; "no_effect"; "all", any verdict that fails (lint, effect, collectives), and
    numerics where the world has values. Each of them also finds a graph that no later stage can use. world: as for
    `run`, also a pool; "auto" is a fake world for memory and no_effect. In a process that torchrun started, or in a
    rank, its ranks are used, and each gets the result. timeout: seconds for the whole call. progress: as for `run`.

    For numerics, every value of the pass's two graphs is on the host at once, on every rank: reduce a large model
    first. Raises WorkbenchError for what cannot run here, RankError where a rank fails.
    """
    recipe = runnable(recipe, world)
    if check not in CHECKS:
        raise WorkbenchError(f"check {check!r} is none of {', '.join(CHECKS)}")
    if not recipe.pass_names:
        raise WorkbenchError(f"recipe {recipe.name!r} has no passes, so there is none to find: add some to "
                             "joint_passes or passes")
    if world == "fake" and check == "numerics":
        raise WorkbenchError("check numerics compares values, and a fake world has none: take world gloo or nccl, or "
                             "check all, memory or no_effect")
    if world == "auto" and check in ("memory", "no_effect") and not among_ranks(world):
        world = "fake"
    return on_ranks(recipe, world, on_rank, check, timeout=timeout, progress=progress)[1][0]


def on_rank(recipe: Recipe, check: Check, post: Post) -> Bisection:
    """One rank's part of `bisect`: every rank of the world calls it, and gets the same result."""
    world = current_world()
    given: list[tuple[list[Any], list[Any]]] = []
    values = check == "numerics" or (check == "all" and not world.is_fake)
    note = (lambda joint: given.append(inputs_of(joint))) if values else None
    unchecked: dict[str, str] = {}
    try:
        built = build(recipe.model_copy(update={"strict": False}), world, progress=post.stage, captured=note)
    except UnusableGraph as error:
        found: Found | None = Found(error.passed, f"lint FAIL: {error.problem}", ranks=(world.rank,))
    else:
        try:
            found, unchecked = _searched(built, recipe, check, post, given)
        finally:
            built.step.close()
    where = f"a fake world of {world.size} ranks" if world.is_fake else f"{world.size} {world.kind} ranks"
    covered = (*LIGHT, *(["numerics"] if values else [])) if check == "all" else ()
    return Bisection(recipe.name, where, check, tuple(recipe.pass_names), found, unchecked, covered)


def _searched(
    built: Built, recipe: Recipe, check: Check, post: Post, given: list[tuple[list[Any], list[Any]]]
) -> tuple[Found | None, dict[str, str]]:
    names = [r.name for r in built.records]
    if check == "no_effect":
        unchecked = {r.name: v.message for r in built.records
                     if (v := r.verdict("effect")) is not None and v.outcome is Outcome.UNKNOWN}
        return over_ranks(first_told(built.records, (Outcome.NO_EFFECT,), recipe.expect.no_effect), names), unchecked
    if check == "memory":
        unchecked = {r.name: "it makes compiled callables, and estimates need a graph" for r in built.records
                     if r.memory is None}
        return over_ranks(first_growth(built.records), names), unchecked
    told, records = None, built.records
    unchecked = {}
    if check == "all":
        told = over_ranks(first_told(records, expected=recipe.expect.no_effect), names)
        unchecked = {r.name: f"{v.check}: {v.message}" for r in records for v in r.verdicts
                     if v.outcome is Outcome.UNKNOWN}
    if told is not None:  # a graph that fails lint may hang when it runs
        records = records[: names.index(told.record) + (not told.problem.startswith("lint"))]
    if not given:
        return told, unchecked
    post.stage("numerics")
    primals, tangents = given[0]
    with deterministic(recipe.training.deterministic), revealing(primals, tangents) as tangents:
        departed, others = first_departure(records, primals, tangents, group_size(built.authored))
    if departed is not None and told is not None and departed.record == told.record:
        departed = replace(departed, problem=f"{departed.problem}; {told.problem}")
    return departed or told, unchecked | others


def inputs_of(joint: JointGraph) -> tuple[list[Any], list[Any]]:
    """The flat primals and tangents of one step, as numerics takes them, from a capture that no pass has touched.

    The capture stays open: a pass may break the step that is built of it. Every rank must call it.
    """
    return real_inputs(compile_step(divide(joint.fork())), joint.authored.microbatch())


def first_departure(
    records: Sequence[PassRecord], inputs: list[Any], tangents: list[Any], size: int
) -> tuple[Found | None, dict[str, str]]:
    """The first pass, and node, that breaks its numerics contract; and the passes that were not compared, with why.

    inputs, tangents: one step's, flat, as the graphs receive them. size: ranks of the largest group. Every rank must
    call it, and gets the same result.
    """
    unchecked: dict[str, str] = {}
    for record in records:
        if record.parts == ("step",):
            unchecked[record.name] = "it works on the joined graph, which level full compares"
            continue
        if record.at_capture:
            unchecked[record.name] = "done while tracing, so it received no other graph"
            continue
        problem = _departs(record, inputs, tangents, size)
        if problem:
            before = _traced(record, record.before, inputs, tangents)
            after = _traced(record, record.after, inputs, tangents)
            assert before is not None
            return first_node(record, before, after, problem, size), unchecked
    return None, unchecked


def _departs(record: PassRecord, inputs: list[Any], tangents: list[Any], size: int) -> str:
    """Why the pass broke its contract, the same on every rank; "" where it kept it."""
    with torch.no_grad():
        written = written_inputs(record, inputs, tangents)
        before, after, error = run_graphs(record, record.before, inputs, tangents, written), [], ""
        try:
            after = run_graphs(record, record.after, inputs, tangents, written)
        except Exception as raised:
            error = f"its graph raises {type(raised).__name__}: {first_line(raised)}"
        for rank, text in enumerate(gathered(error)):
            if text:
                return f"rank {rank}: {text}"
        found = numerics.verdict(compare_graphs(record, before, after, written, size))
    return found.message if found.outcome is Outcome.FAIL else ""


def _traced(record: PassRecord, graphs: Sequence[Any], inputs: list[Any], tangents: list[Any]) -> Trace | None:
    """The values of all nodes; None for compiled callables, which have no nodes."""
    plain = [graph_of(g) for g in graphs] if graphs is record.before else graphs
    if not all(isinstance(g, GraphModule) for g in plain):
        return None
    order = saved_order(*map(graph_of, record.before)) if len(plain) == 2 else ()
    return trace(plain, inputs, tangents, order)
