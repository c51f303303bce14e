"""Make a mutant, judge it by its structure on a fake world, and by its values on real ranks."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from mutants.edits import settle
from mutants.operators import OPERATORS
from mutants.subjects import Subject, subject
from torch.fx import GraphModule
from two_operators import as_two_operators

from workbench import Outcome, PassRecord, Verdict, facts_of
from workbench.checks import agreement
from workbench.checks.numerics import verdict
from workbench.checks.operands import gradient_digests
from workbench.passes.registry import RegisteredPass, graph_changed
from workbench.pipeline.proofs.numerics_proof import compare_graphs, revealing
from workbench.pipeline.report import memory_of
from workbench.pipeline.run_passes import copy_graph
from workbench.recipe.contracts import CONTRACTS, Numerics, Options, PassContract, Stage, declare
from workbench.recipe.wording import first_line
from workbench.torch_api.determinism import deterministic
from workbench.torch_api.distributed.fake import without_log
from workbench.world.mesh import all_gather_object, current_world

NAME = "mutant"
OTHER_INPUTS = 3
_HELD: dict[str, Subject] = {}
_FUSED: list[Any] = []


@dataclass(frozen=True)
class Mutant:
    """One fault: which operator, where, and by which random numbers. ranks: "all", or "one": on rank 1 alone."""

    subject: str
    part: str
    operator: str
    seed: str
    ranks: str

    @property
    def key(self) -> str:
        return "/".join(asdict(self).values())


def mutate(graph: GraphModule, mutant: Mutant) -> tuple[GraphModule, list[str], bool] | None:
    """The mutated copy, the names of the touched nodes, and whether the metadata behind them was restated.

    None where the graph has no place for the operator. The same on every rank.
    """
    rng, item = Random(f"{mutant.operator}/{mutant.seed}"), OPERATORS[mutant.operator]
    copy = copy_graph(graph, facts_of(graph).step)
    try:
        with without_log():
            touched = item.edit(copy, rng)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, NotImplementedError, AssertionError):
        return None  # torch refuses the planted operator at once: nothing is left to be judged
    if touched is None:
        return None
    names = list(dict.fromkeys(n if isinstance(n, str) else n.name for n in touched))
    settled = item.kind != "metadata" and rng.random() < 0.5 and settle(copy, names)
    copy.recompile()
    return copy, names, settled


def contract(stage: Stage) -> PassContract:
    """That of a user's EXACT pass, known by its name."""
    declared = PassContract(NAME, stage, Numerics.EXACT, "plants a fault", source="user")
    if CONTRACTS.get(NAME) != declared:
        declare(declared)
    return declared


def record_of(whole: Subject, part: str, changed: GraphModule) -> PassRecord:
    """What the pipeline notes of a pass that made `changed` of its graph."""
    before = whole.graphs(part)
    after = tuple(changed if graph is whole.graph(part) else graph for graph in before)
    stage = Stage.JOINT if part == "joint" else Stage.PARTITIONED
    item = RegisteredPass(contract(stage), print, graph_changed)
    return PassRecord(item, Options(), before, after, 0.0, 0.0)


def structural(whole: Subject, mutant: Mutant, changed: GraphModule) -> tuple[list[Verdict], bool]:
    """The light verdicts of a mutant, and of one on a single rank how its collectives compare with the others'; and
    whether an estimate of memory has grown.
    """
    record = record_of(whole, mutant.part, changed)
    verdicts = record.verdicts
    if mutant.ranks == "one" and not verdicts[0].evidence.get("malformed"):
        sides = record.before, record.after
        found = agreement.difference(list(map(agreement.schedule, sides)))
        if found := found or agreement.other_gradient(list(map(gradient_digests, sides))):
            verdicts.append(Verdict("collectives", Outcome.FAIL, found[2], {"index": found[1]}))
    before, after = memory_of(record) or ({}, {})
    return verdicts, any(after[key] > size for key, size in before.items())


def names_one(text: str, names: Sequence[str]) -> bool:
    """Whether a sentence has one of the names as a word."""
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)


def prepare(name: str) -> None:
    """Capture a subject on this rank, and run its graphs once. Every rank must call it."""
    if name not in _HELD:
        _HELD.clear()
        if not _FUSED:  # operators with CUDA kernels alone, for as long as this rank lives
            _FUSED.append(as_two_operators("CPU"))
            _FUSED[0].__enter__()
        _HELD[name] = subject(name, current_world())


def held() -> str:
    """The subject that this rank has captured, or ""."""
    return next(iter(_HELD), "")


def varied(values: Sequence[Any], seed: int) -> list[Any]:
    """Other values of the same kinds, on all ranks alike: numbers moved by seeded noise, and other tokens.

    Tokens go through the vocabulary of 256 in steps of 8, from 0 and from 127 on, so that they hold each bound of a
    rank's part of it; the third time they are those of the step, rolled.
    """
    found = []
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            noise = torch.Generator().manual_seed(1000 * seed + place)
            if value.is_floating_point():
                factor = 1 + 0.2 * torch.randn(value.shape, generator=noise)
                value = (value * factor + 0.05 * torch.randn(value.shape, generator=noise)).to(value.dtype)
            elif value.dtype == torch.int64 and value.dim() == 2:
                steps = (8 * torch.arange(value.numel()) + {1: 0, 2: 127}.get(seed, 0)) % 256
                value = (steps if seed < OTHER_INPUTS else value.flatten().roll(seed)).view(value.shape)
        found.append(value)
    return found


def numeric(mutant: Mutant, names: list[str], locate: bool) -> dict[str, Any]:
    """Run a mutant against its original on these ranks: the outcome, its sentence, and what other inputs say.

    Every rank must call it, with the names that the fake world gave.
    """
    prepare(mutant.subject)
    whole = _HELD[mutant.subject]
    made = mutate(whole.graph(mutant.part), mutant)
    if made is None or made[1] != names:
        raise AssertionError(f"{mutant.key}: the fake world touched {names}, and this rank {made and made[1]}")
    mine = made[0] if mutant.ranks == "all" or dist.get_rank() == 1 else whole.graph(mutant.part)
    record = record_of(whole, mutant.part, mine)
    contract(record.stage)
    with deterministic(True), torch.no_grad():
        with revealing(whole.inputs, whole.tangents) as tangents:
            told = _compared(whole, record, whole.inputs, tangents)
            if told["outcome"] != "PASS":
                return told | ({"bisect": _located(record, whole, tangents)} if locate else {})
        others = [_compared(whole, record, varied(whole.inputs, i), varied(whole.tangents, i))["outcome"]
                  for i in range(1, OTHER_INPUTS + 1)]
    return told | {"others": [outcome for outcome in others if outcome != "PASS"]}


def _located(record: PassRecord, whole: Subject, tangents: list[Any]) -> list[str]:
    """The node that `bisect` blames, as the text of both graphs has it."""
    from workbench.lab.bisect.search import Inputs, first_wrong

    blamed = first_wrong([record], Inputs(whole.inputs, tangents, whole.size))[0]
    return [] if blamed is None else [place.text for place in (blamed.before, blamed.after) if place is not None]


def _compared(whole: Subject, record: PassRecord, inputs: list[Any], tangents: list[Any]) -> dict[str, Any]:
    """One run of the mutant against the original."""
    mine, error = None, ""
    try:
        mine = compare_graphs(record, inputs, tangents, whole.size)
    except Exception as raised:
        error = f"its graph raises {type(raised).__name__}: {first_line(raised)}"
    ranks = all_gather_object((mine, error))
    for rank, (_, text) in enumerate(ranks):
        if text:
            return {"outcome": "RAISED", "message": f"rank {rank}: {text}"}
    said = verdict([comparison for comparison, _ in ranks])
    return {"outcome": str(said.outcome), "message": said.message}
