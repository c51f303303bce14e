"""`bisect`: build a recipe on its ranks, and find the first pass that fails a check, and the node where it fails."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from workbench.checks import numerics
from workbench.checks.agreement import exchange
from workbench.checks.verdicts import Outcome
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.lower import compile_step
from workbench.graph.partition import partition
from workbench.lab.bisect.nodes import Found, allow, trace, wrong_node
from workbench.pipeline.build import build
from workbench.pipeline.progress import Post, Progress
from workbench.pipeline.proofs.numerics_proof import (
    compare_graphs,
    compare_on_ranks,
    group_size,
    moved_inputs,
    real_inputs,
    revealing,
)
from workbench.pipeline.recipe_ranks import WorldChoice, on_ranks, runnable
from workbench.pipeline.run_passes import PassRecord
from workbench.recipe.contracts import Numerics
from workbench.recipe.files import print_result, writable
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import first_line, json_text
from workbench.tools.command_end import FAILED, PASSED, first_rank
from workbench.torch_api.determinism import deterministic
from workbench.world.mesh import all_gather_object, current_world
from workbench.world.ranks import RankPool


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`: `found` is None where all of `passes` hold. covered: the verdicts that were asked for.
    unchecked: by pass, why one has no answer.
    """

    recipe: str
    world: str
    passes: tuple[str, ...]
    found: Found | None
    unchecked: dict[str, str]
    covered: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.found is None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"ok": self.ok, **asdict(self)}

    def __repr__(self) -> str:
        lines = [f"bisect: {self.recipe} on {self.world}; passes {', '.join(self.passes)}"]
        lines += _lines(self.found, self.passes)
        lines.append(f"covered: {', '.join(self.covered)}")
        return "\n".join(lines + [f"not checked: pass {name!r}: {why}" for name, why in self.unchecked.items()])


def _lines(first: Found | None, passes: Sequence[str]) -> list[str]:
    if first is None:
        return ["nothing found: no verdict fails, and every pass had its effect"]
    lines = [f"first pass: {first.record!r}, {passes.index(first.record) + 1} of {len(passes)}: {first.problem}"]
    node = first.after
    if node is None:
        return lines
    ranks = f"on {'rank' if len(first.ranks) == 1 else 'ranks'} {', '.join(map(str, first.ranks))}"
    lines.append(f"first node: {node.name} ({node.operator}) of the {node.graph} graph, {ranks}: {first.difference}")
    lines += [f"  {side:<7}{place}" for side, place in (("before", first.before), ("after", node)) if place]
    return lines


def command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench bisect`."""
    writable(args.json)
    result = bisect(recipe, world=args.world, timeout=args.timeout)
    if first_rank():
        print_result(lambda: result, args.json, lambda: json_text(result.to_dict()))
    return PASSED if result.ok else FAILED


def bisect(
    recipe: Recipe | str | os.PathLike[str],
    *,
    world: WorldChoice | RankPool = "auto",
    timeout: float = 600.0,
    progress: Progress = True,
) -> Bisection:
    """Build `recipe` on every rank, and find the first pass with a verdict that fails, and the first node that does.

    Verdicts are lint, effect, collectives, and where the world has values numerics: each pass against the graph it
    received, on the same inputs, rank by rank; every value of both graphs is then on the host of each rank. world,
    progress: as for `run`; the ranks of torchrun or a rank's own are used. timeout: seconds for the whole call.
    Raises WorkbenchError for what cannot run here, RankError where a rank fails.
    """
    recipe = runnable(recipe, world)
    if not recipe.pass_names:
        raise WorkbenchError(f"recipe {recipe.name!r} has no passes, so there is none to find: add some to "
                             "joint_passes or passes")
    return on_ranks(recipe, world, on_rank, timeout=timeout, progress=progress)[0]


def on_rank(recipe: Recipe, post: Post) -> Bisection:
    """One rank's part of `bisect`: every rank of the world calls it, and gets the same result."""
    world = current_world()
    captured: list[Inputs] = []
    note = None if world.is_fake else lambda joint: captured.append(inputs_of(joint))
    unchecked: dict[str, str] = {}

    def stage(name: str) -> None:
        post.stage(name)
        exchange(())  # raises what `_shared` gives on a rank that a pass before has left no usable graph

    try:
        built = build(recipe.model_copy(update={"strict": False}), world, progress=stage, captured=note)
    except UnusableGraph as error:
        error = _shared(error)
        problem = f"{error.check} FAIL: {error.problem}"
        first: Found | None = Found(error.passed, problem, ranks=error.ranks or (world.rank,))
    else:
        post.stage("look at each pass")
        with closing(built.step), deterministic(recipe.training.deterministic):
            inputs = captured[0] if captured else None
            first, unchecked = first_wrong(built.records, inputs, recipe.expect.no_effect)
        schedule = built.schedule
        if first is None and schedule.outcome is Outcome.FAIL and schedule.evidence["pass"]:
            first = Found(
                schedule.evidence["pass"],
                f"collectives FAIL: {schedule.message}",
                ranks=(schedule.evidence["rank"],),
            )
    where = f"a fake world of {world.size} ranks" if world.is_fake else f"{world.size} {world.kind} ranks"
    covered = ("lint", "effect", "collectives", *(() if world.is_fake else ("numerics",)))
    return Bisection(recipe.name, where, tuple(recipe.pass_names), first, unchecked, covered)


def _shared(error: UnusableGraph) -> UnusableGraph:
    """The error as every rank raises it: the others are at the start of a stage, or compare their collectives."""
    try:
        if not error.ranks:
            exchange((), error)
    except UnusableGraph as shared:
        return shared
    return error


@dataclass(frozen=True)
class Inputs:
    """The flat primals and tangents of one step. size: ranks of the largest group."""

    primals: list[Any]
    tangents: list[Any]
    size: int


def inputs_of(joint: JointGraph) -> Inputs:
    """Of one step, from a capture that no pass has touched. Every rank must call it."""
    step = compile_step(partition(joint.fork()))
    return Inputs(*real_inputs(step, joint.authored.microbatch()), group_size(joint.authored))


def first_wrong(
    records: Sequence[PassRecord], inputs: Inputs | None = None, expected: Collection[str] = ()
) -> tuple[Found | None, dict[str, str]]:
    """The first pass with a verdict that fails on any rank, and its first wrong node; and why others were not checked.

    Without inputs no values are compared. Passes in `expected` may have no effect. Every rank calls it, and gets the
    same.
    """
    unchecked: dict[str, str] = {}
    for record in records:
        problems = all_gather_object(_light_problem(record, expected))
        if not all(problem.startswith(Outcome.NO_EFFECT) for problem in problems):  # an effect on one rank is one
            problems = ["" if problem.startswith(Outcome.NO_EFFECT) else problem for problem in problems]
        ranks = tuple(rank for rank, problem in enumerate(problems) if problem)
        unusable = any(problem.startswith("lint") for problem in problems)  # such a graph may hang when it runs
        if record.parts == ("step",):
            unchecked[record.name] = "it works on the joined graph, which level full compares"
        elif record.at_capture:
            unchecked[record.name] = "done while tracing, so it received no other graph"
        elif inputs is not None and not unusable:
            with revealing(inputs.primals, inputs.tangents) as tangents, torch.no_grad():
                departure = _first_departure(record, replace(inputs, tangents=tangents))
            if departure is not None and ranks:
                departure = replace(departure, problem=f"{departure.problem}; {problems[ranks[0]]}")
            if departure is not None:
                return departure, unchecked
        if ranks:
            return Found(record.name, problems[ranks[0]], ranks=ranks), unchecked
        for verdict in record.verdicts:
            if verdict.outcome is Outcome.UNKNOWN:
                unchecked.setdefault(record.name, f"{verdict.check}: {verdict.message}")
    return None, unchecked


def _light_problem(record: PassRecord, expected: Collection[str]) -> str:
    """The gravest verdict that fails without values; "" where none does."""
    failures = [verdict for verdict in record.verdicts if verdict.outcome is Outcome.FAIL]
    if failures:
        return f"{failures[0].check} FAIL: {failures[0].message}"
    idle = [] if record.name in expected else [v for v in record.verdicts if v.outcome is Outcome.NO_EFFECT]
    return f"NO_EFFECT: {idle[0].message}" if idle else ""


def _first_departure(record: PassRecord, inputs: Inputs) -> Found | None:
    """The pass, and its first node over all ranks, if it breaks its numerics contract; the pass alone where it has no
    nodes.
    """
    try:
        mine = compare_graphs(record, inputs.primals, inputs.tangents, inputs.size)
    except Exception as error:
        raised = f"its graph raises {type(error).__name__}: {first_line(error)}"
        mine = numerics.Comparison(str(record.item.contract.numerics), None, 1, (raised,), math.inf)
    comparisons = compare_on_ranks(record, inputs.primals, inputs.tangents, inputs.size, mine)
    verdict = numerics.verdict(comparisons)
    if verdict.outcome is not Outcome.FAIL:
        return None
    whole = Found(record.name, verdict.message, ranks=tuple(range(len(comparisons))))
    before = trace(record, record.before, inputs.primals, inputs.tangents)
    after = trace(record, record.after, inputs.primals, inputs.tangents)
    if before is None or after is None:
        return whole
    if record.item.contract.numerics is not Numerics.EXACT:
        far = trace(record, record.before, *moved_inputs(record, inputs.primals, inputs.tangents))
        if far is not None:
            allow(before, far)
    coarse = torch.empty(0, dtype=numerics.coarsest(before.outputs))

    def bound(a: torch.Tensor, b: torch.Tensor) -> float | None:
        return numerics.bound_of(record.item.contract, numerics.coarsest([a, b, coarse]), inputs.size)

    node = wrong_node(whole, before, after, bound)
    if any(all_gather_object(after.raised is not None)) and after.raised is None:  # another rank ended the run
        node = None
    by_rank = {
        rank: entry for rank, entry in enumerate(all_gather_object(node)) if entry is not None
    }
    if not by_rank:
        return replace(whole, difference="no node that differs has a counterpart in the graph before")
    # a rank's error reaches other ranks through a collective alone, which comes later
    _, first = min(by_rank.values(), key=lambda entry: entry[0])
    return replace(first, ranks=tuple(rank for rank, (_, entry) in by_rank.items() if entry.after == first.after))
