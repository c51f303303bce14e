"""`bisect`: build a recipe on its ranks, and find the first pass that fails a check, and the node where it fails."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from workbench.checks import numerics
from workbench.checks.collectives import gathered
from workbench.checks.verdicts import SEVERITY, Outcome
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.capture import JointGraph
from workbench.graph.lower import compile_step
from workbench.graph.partition import partition
from workbench.lab.bisect.nodes import Found, Trace, trace, wrong_node
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
from workbench.pipeline.recipe_ranks import WorldChoice, on_ranks, runnable
from workbench.pipeline.run_passes import PassRecord
from workbench.pipeline.train import deterministic
from workbench.recipe.files import print_result, writable
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import first_line, json_text
from workbench.tools.command_end import FAILED, PASSED, first_rank
from workbench.world.mesh import current_world
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


def _lines(found: Found | None, passes: Sequence[str]) -> list[str]:
    if found is None:
        return ["nothing found: no verdict fails, and every pass had its effect"]
    lines = [f"first pass: {found.record!r}, {passes.index(found.record) + 1} of {len(passes)}: {found.problem}"]
    node = found.after
    if node is None:
        return lines
    ranks = f"on {'rank' if len(found.ranks) == 1 else 'ranks'} {', '.join(map(str, found.ranks))}"
    lines.append(f"first node: {node.name} ({node.operator}) of the {node.graph} graph, {ranks}: {found.difference}")
    lines += [f"  {side:<7}{place}" for side, place in (("before", found.before), ("after", node)) if place]
    return lines + [f"  changed: {text}" for text in found.changed]


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
    return on_ranks(recipe, world, on_rank, timeout=timeout, progress=progress)[1][0]


def on_rank(recipe: Recipe, post: Post) -> Bisection:
    """One rank's part of `bisect`: every rank of the world calls it, and gets the same result."""
    world = current_world()
    inputs: list[tuple[list[Any], list[Any]]] = []
    note = None if world.is_fake else lambda joint: inputs.append(inputs_of(joint))
    unchecked: dict[str, str] = {}
    try:
        built = build(recipe.model_copy(update={"strict": False}), world, progress=post.stage, captured=note)
    except UnusableGraph as error:
        found: Found | None = Found(error.passed, f"lint FAIL: {error.problem}", ranks=(world.rank,))
    else:
        with closing(built.step):
            found, unchecked = _searched(built, recipe, post, inputs)
    where = f"a fake world of {world.size} ranks" if world.is_fake else f"{world.size} {world.kind} ranks"
    covered = ("lint", "effect", "collectives", *(() if world.is_fake else ("numerics",)))
    return Bisection(recipe.name, where, tuple(recipe.pass_names), found, unchecked, covered)


def _searched(
    built: Built, recipe: Recipe, post: Post, inputs: list[tuple[list[Any], list[Any]]]
) -> tuple[Found | None, dict[str, str]]:
    records, names = built.records, [record.name for record in built.records]
    told = _over_ranks(first_told(records, recipe.expect.no_effect), names)
    unchecked = {}
    for record in records:
        for verdict in record.verdicts:
            if verdict.outcome is Outcome.UNKNOWN:
                unchecked[record.name] = f"{verdict.check}: {verdict.message}"
    if not inputs:
        return told, unchecked
    if told is not None:  # a graph that fails lint may hang when it runs
        records = records[: names.index(told.record) + (not told.problem.startswith("lint"))]
    post.stage("numerics")
    primals, tangents = inputs[0]
    with deterministic(recipe.training.deterministic), revealing(primals, tangents) as tangents:
        departed, others = first_departure(records, primals, tangents, group_size(built.authored))
    if departed is not None and told is not None and departed.record == told.record:
        departed = replace(departed, problem=f"{departed.problem}; {told.problem}")
    return departed or told, unchecked | others


def first_told(records: Sequence[PassRecord], expected: Collection[str] = ()) -> Found | None:
    """The first pass with a verdict that fails, and its message; passes in `expected` may have no effect."""
    for record in records:
        verdicts = [v for v in record.verdicts if v.outcome is Outcome.FAIL
                    or (v.outcome is Outcome.NO_EFFECT and record.name not in expected)]
        if verdicts:
            worst = min(verdicts, key=lambda v: SEVERITY.index(v.outcome))
            what = f"{worst.check} FAIL" if worst.outcome is Outcome.FAIL else worst.outcome
            return Found(record.name, f"{what}: {worst.message}")
    return None


def _over_ranks(mine: Found | None, passes: Sequence[str]) -> Found | None:
    """The finding of the earliest pass on any rank, with all ranks that found it; every rank must call it."""
    by_rank = {rank: found for rank, found in enumerate(gathered(mine)) if found is not None}
    if not by_rank:
        return None
    first = min(by_rank.values(), key=lambda found: passes.index(found.record))
    return replace(first, ranks=tuple(rank for rank, found in by_rank.items() if found.record == first.record))


def inputs_of(joint: JointGraph) -> tuple[list[Any], list[Any]]:
    """The flat primals and tangents of one step, from a capture that no pass has touched. Every rank must call it."""
    return real_inputs(compile_step(partition(joint.fork())), joint.authored.microbatch())


def first_departure(
    records: Sequence[PassRecord], inputs: list[Any], tangents: list[Any], size: int
) -> tuple[Found | None, dict[str, str]]:
    """The first pass, and node, that breaks its numerics contract; and why other passes were not compared.

    inputs, tangents: of one step, flat. size: ranks of the largest group. Every rank calls it, and gets the same.
    """
    unchecked: dict[str, str] = {}
    for record in records:
        if record.parts == ("step",):
            unchecked[record.name] = "it works on the joined graph, which level full compares"
        elif record.at_capture:
            unchecked[record.name] = "done while tracing, so it received no other graph"
        elif problem := _departs(record, inputs, tangents, size):
            before = trace(record, record.before, inputs, tangents)
            after = trace(record, record.after, inputs, tangents)
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
        verdict = numerics.verdict(compare_graphs(record, before, after, written, size))
    return verdict.message if verdict.outcome is Outcome.FAIL else ""


def first_node(record: PassRecord, before: Trace, after: Trace | None, problem: str, group_size: int) -> Found:
    """The first node, over all ranks, at which `after` breaks the pass's contract; the pass alone where it has none."""
    whole = Found(record.name, problem, ranks=tuple(range(len(gathered(None)))))
    if after is None:
        return whole
    coarse = torch.empty(0, dtype=numerics.coarsest(before.outputs))

    def bound(a: torch.Tensor, b: torch.Tensor) -> float | None:
        return numerics.bound_of(record.item.contract, numerics.coarsest([a, b, coarse]), group_size)

    mine = wrong_node(whole, before, after, bound)
    if any(gathered(after.raised is not None)) and after.raised is None:  # another rank ended the run
        mine = None
    by_rank = {rank: found for rank, found in enumerate(gathered(mine)) if found is not None}
    if not by_rank:
        return replace(whole, difference="the same graphs, run node by node, gave no difference")
    first = min(by_rank.values(), key=lambda found: found[0])[1]
    return replace(first, ranks=tuple(rank for rank, (_, found) in by_rank.items() if found.after == first.after))
