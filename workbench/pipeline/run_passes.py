"""Run a list of passes on a joint graph, or on forward and backward, and record what each did and proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from pydantic import ValidationError
from torch.fx import Graph, GraphModule

from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome
from workbench.errors import UnusableGraph, WorkbenchError, no_exit, place_of
from workbench.graph.callables import Body, bodies_of, graph_of
from workbench.graph.facts import Known, StepFacts, facts_of, set_facts
from workbench.graph.partition import ForwardBackward, Partitioned
from workbench.graph.read.collectives import keep_axes
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import module_path
from workbench.passes.registry import RegisteredPass, find_pass
from workbench.recipe.contracts import Stage
from workbench.recipe.hooks import hook_of
from workbench.recipe.sections import PassSpec, listed
from workbench.torch_api import aot
from workbench.torch_api.devices.host_copies import run_on_cpu
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor import lowering
from workbench.torch_api.ops import is_symbolic

Level = Literal["light", "full"]
JOINT = (Stage.JOINT,)


class Joint(Protocol):
    """What joint passes run on: a JointGraph, or the joint graph that torch.compile hands over."""

    graph: GraphModule
    passes: tuple[str, ...]
    broken: UnusableGraph | None
    known: Known

    def require_open(self) -> None: ...

    def context(self) -> AbstractContextManager[list[Any]]: ...


def choose(spec: PassSpec | str | Mapping[str, Any], stages: Collection[Stage],
           where: str) -> tuple[RegisteredPass, Any]:
    """The registered pass and its validated options. `where` names the caller in messages.

    Raises WorkbenchError for an unknown pass, a pass of another stage, and wrong options.
    """
    try:
        spec = PassSpec.model_validate(spec)
    except ValidationError:
        raise WorkbenchError(
            f"{where} takes passes by name, or as tables with a name, and got {spec!r}"
        ) from None
    item = find_pass(spec.name)
    if item.contract.stage not in stages:
        raise WorkbenchError(
            f"pass {spec.name!r} runs on the {item.contract.stage} stage, and {where} runs "
            f"{' and '.join(stages)} passes: list it there, or drop it"
        )
    try:
        return item, item.contract.options.model_validate(dict(spec.options))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'options'}: {e['msg']}" for e in error.errors()
        )
        raise WorkbenchError(f"pass {spec.name!r}: {problems}") from None


def capture_decompositions(
    specs: Sequence[PassSpec | str | Mapping[str, Any]],
) -> dict[Any, Any] | None:
    """Inductor's table, where one of these joint passes leaves its work to the capture; None where none does."""
    at_capture = any(choose(spec, JOINT, "joint_passes")[1].at_capture for spec in specs)
    return lowering.decomposition_table() if at_capture else None


@uncollected()
def copy_graph(graph: GraphModule, step: StepFacts | None = None) -> GraphModule:
    """A copy that a pass may change: nodes, metadata and facts. The StepFacts are `step`, or the graph's own, shared.

    Raises WorkbenchError for a graph that reads a node before it is computed, as a pass may have left it.
    """
    try:
        copy = aot.clone(graph)
    except KeyError as error:
        raise WorkbenchError(
            f"a graph reads {error.args[0]} before it is computed: see the lint verdict of the "
            "pass before, or call graph.lint() at its end"
        ) from None
    facts = facts_of(graph)
    set_facts(copy, facts.of(facts.part, step))
    for node in copy.graph.nodes:
        if "custom" in node.meta:  # what a pass writes into, and torch copies by reference
            node.meta["custom"] = dict(node.meta["custom"])
    return copy


def apply_pass(
    item: RegisteredPass, graph_or_body: GraphModule | Body, example_inputs: list[Any], options: Any
) -> Any:
    """The pass's result, of the type that its stage asks for. Its errors are raised as WorkbenchError with its name."""
    callables = item.contract.stage in (Stage.LOWERING, Stage.REPLAY)
    graph = graph_of(graph_or_body)
    facts, convention = facts_of(graph), aot.convention_of(graph)
    where = f"pass {item.name!r} on the {facts.part} graph"
    if "static_shapes" in item.contract.needs:
        _require_static(graph, where)
    try:
        with no_exit(where):
            result = item.function(graph_or_body, example_inputs, options=options)
    except WorkbenchError as error:
        if not place_of(error) or repr(item.name) in str(error):
            raise
        raise WorkbenchError(f"{where}: {error}{place_of(error)}") from error
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}"
        raise WorkbenchError(f"{where} {problem}{place_of(error)}") from error
    except BaseException as error:  # an interrupt stays one
        error.add_note(f"in {where}{place_of(error)}")
        raise
    if not (callable(result) if callables else isinstance(getattr(result, "graph", None), Graph)):
        wanted = "a callable" if callables else "the GraphModule, also where it was changed in place"
        kind = type(result).__name__ + " without a graph" * isinstance(result, GraphModule)
        raise WorkbenchError(f"{where} returned {kind}: return {wanted}")
    if not callables:
        set_facts(result, facts)
        aot.set_convention(result, convention)
        run_on_cpu()  # the pass may have imported operators of offloading
    return result


def _require_static(graph: GraphModule, where: str) -> None:
    read = next((n for n in graph.graph.nodes if is_symbolic(n.meta.get("val"))), None)
    if read is not None:
        raise WorkbenchError(
            f"{where}: it needs sizes that are the same in every step, and that of {read.name} "
            f"({module_path(read) or 'an input'}) is read from the device: give it a static size"
        )


def _run_pass(
    item: RegisteredPass, options: Any, before: tuple[Any, ...], known: Known,
    contexts: Iterable[AbstractContextManager[list[Any]]], step: StepFacts | None = None,
) -> PassRecord:
    """Apply a pass to `before`, or to copies with the facts `step`, and add its record to what is known of the run.

    contexts: the tracing state around each graph, which gives the graph's example inputs.
    """
    after, seconds, copying = [], 0.0, 0.0
    for graph, context in zip(before, contexts, strict=True):
        started = time.perf_counter()
        input_graph = graph if isinstance(graph, Body) else copy_graph(graph, step)
        copied = time.perf_counter()
        with context as example_inputs:
            result = apply_pass(item, input_graph, list(example_inputs), options)
        if isinstance(result, GraphModule) and isinstance(graph, GraphModule):
            keep_axes(graph, result)
        after.append(result)
        copying, seconds = copying + copied - started, seconds + time.perf_counter() - copied
    record = PassRecord(item, options, before, tuple(after), seconds, copying, known)
    known.records.append(record)
    return record


def _read_now(record: PassRecord) -> None:
    """Let the checks read the graphs while the pass is at hand. Of a pass whose predicate raises there is no record."""
    try:
        _ = record.verdicts
    except BaseException:
        del record.known.records[-1]
        raise


def run_joint(
    joint: Joint,
    specs: Sequence[PassSpec | str | Mapping[str, Any]],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[PassRecord]:
    """Run the joint passes in order, in place; `progress` is called with each pass's name before it runs.

    specs: a recipe's, or names. A pass that raises leaves `joint.graph` as that pass received it. Raises
    WorkbenchError where a pass is unknown, raises, or returns no graph.
    """
    joint.require_open()
    chosen = [choose(spec, JOINT, "run_joint") for spec in listed(specs, "run_joint")]
    return run_chosen(joint, chosen, progress)


def run_chosen(
    joint: Joint, chosen: Iterable[tuple[RegisteredPass, Any]], progress: Callable[[str], None]
) -> list[PassRecord]:
    """`run_joint` of passes with their options."""
    records: list[PassRecord] = []
    for item, options in chosen:
        joint.require_open()
        progress(item.name)
        record = _run_pass(item, options, (joint.graph,), joint.known, [joint.context()])
        _read_now(record)
        joint.graph, joint.passes = record.after[0], (*joint.passes, item.name)
        joint.broken = record.broken
        records.append(record)
    return records


def run_partitioned(
    pair: Partitioned,
    specs: Sequence[PassSpec | str | Mapping[str, Any]],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[PassRecord], tuple[Any, ...] | None]:
    """Run the passes on forward and backward, or on what a plugin's kind of step made of them; the second result holds
    the bodies of a lowering or replay pass, or None.

    A pass that raises, on either graph, leaves both as it received them.
    """
    chosen = [
        choose(spec, pair.stages, "run_partitioned") for spec in listed(specs, "run_partitioned")
    ]
    records: list[PassRecord] = []
    for item, options in chosen:
        pair.require_usable()
        progress(item.name)
        stage = item.contract.stage
        before: tuple[Any, ...] = pair.graphs
        if stage is Stage.REPLAY:
            before = bodies_of(pair.graphs, pair.known.bodies, pair.facts)
        record = _run_pass(
            item, options, before, pair.known, map(pair.context, pair.parts), pair.facts
        )
        record.order = pair.facts.order
        if item.order_costs is not None and record.has_graphs and record.broken is None:
            record.chosen_order = hook_of("check", "order")(item, record.after, options)
        _read_now(record)
        if stage in (Stage.LOWERING, Stage.REPLAY):
            pair.known.bodies = record.after
        else:
            pair.known.bodies = None  # they are of the graphs before
            for which, result in zip(pair.parts, record.after, strict=True):
                pair.replace(which, result)
        pair.broken, pair.facts.order = record.broken, record.chosen_order or record.order
        records.append(record)
    return records, pair.known.bodies


def each_no_effect(records: Sequence[PassRecord]) -> Iterator[tuple[str, str]]:
    """(pass, reason) for each pass without effect."""
    for record in records:
        for verdict in record.verdicts:
            if verdict.outcome is Outcome.NO_EFFECT:
                yield record.name, verdict.message


def saved_bytes(pair: ForwardBackward) -> int:
    """Bytes that the forward saves for the backward: each storage once, without the step's inputs."""
    return sum(row.held_bytes for row in saved_tensors(pair.forward, pair.backward))
