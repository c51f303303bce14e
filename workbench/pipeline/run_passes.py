"""The pipeline runs a visible list of passes, and after each says what it did and what it proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from pydantic import ValidationError
from torch.fx import GraphModule

from workbench.checks import collectives, effect, static
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import UnusableGraph, WorkbenchError, no_exit, place_of
from workbench.graph.callables import Body, bodies_of
from workbench.graph.facts import StepFacts, facts_of, set_facts
from workbench.graph.partition import PARTS, ForwardBackward, Partitioned
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import module_path
from workbench.passes.registry import RegisteredPass, find_pass
from workbench.recipe.contracts import Stage
from workbench.recipe.sections import PassSpec, listed
from workbench.torch_api import aot
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.ops import is_symbolic

Level = Literal["light", "full"]


JOINT, PARTITIONED = (Stage.JOINT,), (Stage.PARTITIONED, Stage.LOWERING, Stage.REPLAY)


class Joint(Protocol):
    """What joint passes run on: a JointGraph, or the joint graph that torch.compile hands over."""

    graph: GraphModule
    passes: tuple[str, ...]
    broken: UnusableGraph | None

    @property
    def example_inputs(self) -> list[Any]: ...

    def require_open(self) -> None: ...

    def context(self) -> AbstractContextManager[None]: ...


def choose(spec: PassSpec | str, stages: Collection[Stage], where: str) -> tuple[RegisteredPass, Any]:
    """The registered pass and its validated options; WorkbenchError where it is unknown, not of these stages, or they
    are not its options. `where` names the caller.
    """
    spec = PassSpec(name=spec) if isinstance(spec, str) else spec
    item = find_pass(spec.name)
    if item.contract.stage not in stages:
        raise WorkbenchError(
            f"pass {spec.name!r} runs on the {item.contract.stage} stage, and {where} runs "
            f"{' and '.join(stages)} passes: give it to the other list"
        )
    try:
        return item, item.contract.options.model_validate(dict(spec.options))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors())
        raise WorkbenchError(f"pass {spec.name!r}: {problems}") from None


@uncollected()
def copy_graph(graph: GraphModule, step: StepFacts | None = None) -> GraphModule:
    """A copy that a pass may change: nodes, metadata and facts, but for the StepFacts.

    Raises WorkbenchError for a graph that reads a node before it is made, as a pass may have left it.
    """
    try:
        copy = aot.clone(graph)
    except KeyError as error:
        raise WorkbenchError(f"a graph reads {error.args[0]} before it is made: see the lint verdict of the pass before"
                             ", or call graph.lint() at its end") from None
    facts = facts_of(graph)
    set_facts(copy, facts.of(facts.part, step))
    for node in copy.graph.nodes:
        if "custom" in node.meta:  # what a pass writes into, and torch copies by reference
            node.meta["custom"] = dict(node.meta["custom"])
    return copy


def apply_pass(item: RegisteredPass, given: GraphModule | Body, example_inputs: list[Any], options: Any) -> Any:
    """What the pass returns, checked; its own errors come with its name."""
    callables = item.contract.stage in (Stage.LOWERING, Stage.REPLAY)
    graph = given.graph if isinstance(given, Body) else given
    facts = facts_of(graph)
    where = f"pass {item.name!r} on the {facts.part} graph"
    if "static_shapes" in item.contract.needs:
        _require_static(graph, where)
    try:
        with no_exit(where):
            result = item.function(given, example_inputs, options=options)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"{where} raised {type(error).__name__}: {error}{place_of(error)}") from error
    if not (callable(result) if callables else isinstance(result, GraphModule)):
        wanted = "a callable" if callables else "the GraphModule, also where it was changed in place"
        raise WorkbenchError(f"{where} returned {type(result).__name__}: return {wanted}")
    if not callables:
        set_facts(result, facts)
        result.recompile()
    return result


def _require_static(graph: GraphModule, where: str) -> None:
    read = next((n for n in graph.graph.nodes if is_symbolic(n.meta.get("val"))), None)
    if read is not None:
        raise WorkbenchError(f"{where}: it needs sizes that are the same in every step, and that of {read.name} "
                             f"({module_path(read) or 'an input'}) is read from the device: give it a static size")


def run_joint(
    joint: Joint,
    specs: Sequence[PassSpec | str],
    *,
    progress: Callable[[str], None] = lambda _: None,
    seen: static.Seen | None = None,
) -> list[PassRecord]:
    """Run the joint passes in order, in place; `progress` hears each pass's name before it runs.

    `specs` are a recipe's, or names. Each pass works on a copy: one that raises leaves `joint.graph` as that pass
    received it. `seen`: what an earlier call read from the same graphs. Raises WorkbenchError where a pass is unknown,
    raises, or returns no graph.
    """
    joint.require_open()
    chosen = [choose(spec, JOINT, "run_joint") for spec in listed(specs, "run_joint")]
    records: list[PassRecord] = []
    seen = seen or static.Seen()
    for item, options in chosen:
        joint.require_open()
        progress(item.name)
        before = joint.graph
        started = time.perf_counter()
        given = copy_graph(before)
        cloned = time.perf_counter()
        with joint.context():
            after = apply_pass(item, given, joint.example_inputs, options)
        seconds = time.perf_counter() - cloned
        joint.graph, joint.passes = after, (*joint.passes, item.name)
        record = PassRecord(item.name, Stage.JOINT, options, (before,), (after,), seconds, cloned - started)
        static.check(item.effect, item.contract, record, seen)
        joint.broken = static.unusable(record)
        records.append(record)
    return records


@no_exit()
def prove_partition(records: Sequence[PassRecord], pair: Partitioned) -> None:
    """Add what the partitioner made of the tags to the records of the passes that set them."""
    for record in records:
        item, said = find_pass(record.name), record.verdict("effect")
        idle = said is not None and said.outcome is Outcome.NO_EFFECT  # it has said why
        if item.partition_effect is not None and not idle:
            started = time.perf_counter()
            record.verdicts.append(effect.verdict(item.partition_effect(pair.graphs, record.options)))
            record.verify_seconds += time.perf_counter() - started


def run_partitioned(
    pair: Partitioned,
    specs: Sequence[PassSpec | str],
    *,
    progress: Callable[[str], None] = lambda _: None,
    seen: static.Seen | None = None,
    bodies: tuple[Any, ...] | None = None,
) -> tuple[list[PassRecord], tuple[Any, ...] | None]:
    """Run the passes on forward and backward; the second result holds the bodies of a lowering or replay pass, or None.

    A pass that raises, on either graph, leaves both as it received them. `seen` and `bodies`: what an earlier call
    read from the same graphs, and the bodies it made, to go on from there.
    """
    chosen = [choose(spec, PARTITIONED, "run_partitioned") for spec in listed(specs, "run_partitioned")]
    records: list[PassRecord] = []
    seen = seen or static.Seen()
    for item, options in chosen:
        pair.require_usable()
        progress(item.name)
        stage = item.contract.stage
        before: tuple[Any, ...] = bodies_of(pair.graphs, bodies, pair.facts) if stage is Stage.REPLAY else pair.graphs
        results, seconds, copying = [], 0.0, 0.0
        for which, graph in zip(PARTS, before, strict=True):
            started = time.perf_counter()
            given = graph if stage is Stage.REPLAY else copy_graph(graph, pair.facts)
            cloned = time.perf_counter()
            with pair.context(which) as example_inputs:
                results.append(apply_pass(item, given, list(example_inputs), options))
            copying, seconds = copying + cloned - started, seconds + time.perf_counter() - cloned
        after = tuple(results)
        if stage in (Stage.LOWERING, Stage.REPLAY):
            bodies = after
        else:
            for which, result in zip(PARTS, after, strict=True):
                pair.replace(which, result)
        record = PassRecord(item.name, stage, options, before, after, seconds, copying)
        static.check(item.effect, item.contract, record, seen)
        pair.broken = static.unusable(record)
        records.append(record)
    return records, bodies


@no_exit()
def prove_replay(records: Sequence[PassRecord]) -> None:
    """Say anew of replay passes, once the step has run, whether they had their effect."""
    for record in records:
        if record.stage is Stage.REPLAY:
            found = effect.verdict(find_pass(record.name).effect(record.before, record.after, record.options))
            record.verdicts[:] = [found if v.check == "effect" else v for v in record.verdicts]


def agree_on_collectives(pair: Partitioned) -> Verdict:
    """Exchange the ordered list of collectives between the ranks; a difference is refused before any of them runs.

    Every rank must call this. Raises WorkbenchError on every rank, naming the first difference.
    """
    found = collectives.exchange(pair.graphs)  # of a broken graph, too: one rank's must not keep the others waiting
    if found.outcome is Outcome.FAIL:
        raise WorkbenchError(found.message)
    return found


def each_no_effect(records: Sequence[PassRecord]) -> Iterator[tuple[str, str]]:
    """(pass, reason) for each pass that did nothing."""
    for record in records:
        for verdict in record.verdicts:
            if verdict.outcome is Outcome.NO_EFFECT:
                yield record.name, verdict.message


def saved_bytes(pair: ForwardBackward) -> int:
    """Bytes that live between forward and backward because they are saved: each storage once, inputs left out."""
    return sum(row.held_bytes for row in saved_tensors(*pair.graphs))
