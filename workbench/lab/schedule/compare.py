"""Captures ranks of a mesh of any size one by one, and compares their ordered collectives, before any rank runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from torch.distributed.tensor import DTensor

from workbench.authoring.author import author
from workbench.authoring.authored import Authored
from workbench.authoring.families import find_family
from workbench.checks.agreement import Entry, difference, schedule
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError
from workbench.graph.read.collectives import list_collectives
from workbench.graph.read.nodes import provenance
from workbench.passes.registry import find_pass
from workbench.pipeline.progress import Progress, telling
from workbench.pipeline.stages import before_lowering
from workbench.recipe.recipe import Recipe
from workbench.recipe.wording import counted
from workbench.tools.command_end import FAILED, PASSED
from workbench.torch_api.distributed.dtensor import local_shape, ranks_of
from workbench.torch_api.garbage import uncollected
from workbench.world.fake import fake_world


@dataclass(frozen=True)
class Schedules:
    """The result of `compare_schedules`. roles: the first rank of each role, and the number of its ranks."""

    size: int
    roles: dict[int, int]
    checked: tuple[int, ...]
    verdict: Verdict

    def __str__(self) -> str:
        roles = ", ".join(f"rank {rank}" + (f" and {count - 1} more" if count > 1 else "")
                          for rank, count in self.roles.items())
        return (
            f"{self.size} ranks in {counted(len(self.roles), 'role')}: {roles}\n"
            f"captured as {'rank' if len(self.checked) == 1 else 'ranks'} {', '.join(map(str, self.checked))}\n"
            f"collectives {self.verdict.outcome}: {self.verdict.message}"
        )


def command(recipe: Recipe, args: argparse.Namespace) -> int:
    """`workbench schedule`."""
    numbers = all(part.strip().isdecimal() for part in args.ranks.split(","))
    schedules = compare_schedules(
        recipe, [int(rank) for rank in args.ranks.split(",")] if numbers else args.ranks
    )
    print(schedules)
    return FAILED if schedules.verdict.outcome is Outcome.FAIL else PASSED


@uncollected()
def compare_schedules(
    recipe: Recipe, ranks: str | Sequence[int] = "roles", progress: Progress = True
) -> Schedules:
    """Capture `recipe` as each of `ranks` on a fake world, run its passes, and compare the ordered collectives.

    ranks: "roles", the first rank of each role and the last rank; "all"; or a list of ranks. Ranks have the same role
    where all their parameters have the same local shapes; uneven shards make several roles. A model or pass of your own
    may act differently on ranks of one role: then the verdict is UNKNOWN unless all ranks were captured. Lowering and
    replay passes are skipped. The ranks are captured one by one, in this process, a second or more each. progress: as
    for `run`.

    Raises WorkbenchError for a rank that does not exist, and where the recipe cannot be captured.
    """
    size = recipe.mesh.world_size
    entries, sources = [], []
    with telling(progress) as tell:
        tell("roles")
        with fake_world(size) as world:
            authored = author(recipe, world)
            roles = roles_of(authored)
        chosen = _chosen(ranks, size, roles)
        for number, rank in enumerate(chosen, 1):
            tell_rank = tell.of(f"rank {rank}, {number} of {len(chosen)}")
            launched, lines = _scheduled(recipe, size, rank, tell_rank)
            entries.append(launched)
            sources.append(lines)
    verdict = _verdict(chosen, entries, sources)
    custom = _custom(recipe)
    if verdict.outcome is Outcome.PASS and custom and len(chosen) < size:
        why = (
            f"ranks {', '.join(map(str, chosen))} agree, and {custom} is your own, which may do something else on each "
            'rank: take --ranks all (ranks="all") to capture every rank'
        )
        verdict = Verdict("collectives", Outcome.UNKNOWN, why)
    return Schedules(size, roles, chosen, verdict)


def _custom(recipe: Recipe) -> str:
    """The recipe's model or first pass that a user registered: it may act differently on ranks of one role."""
    if find_family(recipe.model.family).sizes is not None:
        return f"model {recipe.model.family!r}"
    mine = [name for name in recipe.pass_names if find_pass(name).contract.source == "user"]
    return f"pass {mine[0]!r}" if mine else ""


def roles_of(authored: Authored) -> dict[int, int]:
    """The first rank of each role, and the number of its ranks."""
    kinds = sorted(
        {
            (tuple(p.shape), p.placements, p.device_mesh)
            for p in authored.module.parameters()
            if isinstance(p, DTensor)
        },
        key=repr,
    )
    places = {mesh: dict(zip(ranks_of(mesh), product(*map(range, mesh.shape)), strict=True))
              for *_, mesh in kinds}  # experts may be on a mesh of their own
    first: dict[tuple[tuple[int, ...], ...], int] = {}
    roles: dict[int, int] = {}
    for rank in range(authored.world.size):
        role = tuple(local_shape(shape, mesh.shape, places[mesh][rank], placements)
                     for shape, placements, mesh in kinds)
        leader = first.setdefault(role, rank)
        roles[leader] = roles.get(leader, 0) + 1
    return roles


def _chosen(ranks: str | Sequence[int], size: int, roles: dict[int, int]) -> tuple[int, ...]:
    if ranks == "all":
        return tuple(range(size))
    if isinstance(ranks, str):
        if ranks != "roles":
            raise WorkbenchError(f"ranks {ranks!r}: expected roles, all, or ranks such as 0,3")
        return tuple(sorted({*roles, size - 1}))
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks:
        raise WorkbenchError(
            f"rank {wrong[0] if wrong else 'none'}: the mesh has ranks 0 to {size - 1}"
        )
    return tuple(sorted(set(ranks)))


def _scheduled(
    recipe: Recipe, size: int, rank: int, progress: Callable[[str], None]
) -> tuple[list[Entry], list[str]]:
    """The ordered collectives of one rank, and the source line of each."""
    with fake_world(size, rank) as world:
        graphs = before_lowering(recipe, world, progress=progress).graphs
        lines = []
        for graph in graphs:
            nodes = {node.name: node for node in graph.graph.nodes}
            lines += [f"{c.node}, {provenance(nodes[c.node])}" for c in list_collectives(graph)]
        return schedule(graphs), lines


def _verdict(
    ranks: Sequence[int], entries: Sequence[list[Entry]], sources: Sequence[list[str]]
) -> Verdict:
    if len(ranks) == 1:
        why = "one rank was captured, and it has no other to be compared with"
        return Verdict("collectives", Outcome.UNKNOWN, why)
    departure = difference(entries, ranks)
    if departure is None:
        text = f"{len(entries[0])} collectives in the same order on all that were captured"
        return Verdict("collectives", Outcome.PASS, text, {"collectives": len(entries[0])})
    position, index, sentence = departure
    at_index = [launched[index:index + 1] for launched in entries]
    other = next(i for i, entry in enumerate(at_index) if entry != at_index[position])
    lines = [
        f"rank {ranks[i]}: {sources[i][index]}"
        for i in sorted({position, other})
        if index < len(sources[i])
    ]
    evidence = {"rank": ranks[position], "index": index}
    return Verdict("collectives", Outcome.FAIL, "\n  ".join([sentence, *lines]), evidence)
