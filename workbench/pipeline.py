"""The pipeline runs a visible list of passes, and after each says what it did and what it proved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from workbench import passes as _package_passes  # noqa: F401  registers the package's own
from workbench.analysis.diff import GraphDiff, diff
from workbench.joint_graph import JointGraph
from workbench.contracts import Stage
from workbench.errors import WorkbenchError
from workbench.forward_backward import ForwardBackward
from workbench.passes.registry import RegisteredPass, find_pass
from workbench.recipe import PassSpec
from workbench.torch_api import aot
from workbench.verify import collectives, effect, lint, memory
from workbench.verify.verdicts import Outcome, Verdict, worst

Level = Literal["light", "full"]
Graphs = tuple[GraphModule, ...]


@dataclass
class PassRecord:
    """One pass of one run: what went in, what came out, how long it took and what was proved.

    `before` and `after` are copies: one joint graph, or the forward and the backward. Seconds are wall time.
    """

    name: str
    stage: Stage
    options: Any
    before: Graphs
    after: tuple[Any, ...]
    seconds: float
    verify_seconds: float
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        return worst(self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The last verdict of that check."""
        return next((v for v in reversed(self.verdicts) if v.check == check), None)

    def diffs(self) -> list[GraphDiff]:
        """What the pass added, removed and moved, graph by graph; empty for a lowering pass."""
        if any(not isinstance(a, GraphModule) for a in self.after):
            return []
        return [diff(b, a) for b, a in zip(self.before, self.after, strict=True)]

    def __repr__(self) -> str:
        return f"PassRecord({self.name}, {self.stage}, {self.outcome}: {'; '.join(map(str, self.verdicts))})"


def _options(item: RegisteredPass, spec: PassSpec) -> Any:
    return item.contract.options.model_validate(dict(spec.options))


def _checked(name: str, result: Any, lowering: bool) -> Any:
    wanted = "a callable" if lowering else "a GraphModule"
    if not (callable(result) if lowering else isinstance(result, GraphModule)):
        raise WorkbenchError(f"pass {name!r} returned {type(result).__name__}: return {wanted}")
    return result


def _lint(record: PassRecord) -> Verdict:
    found = [lint.lint(b, a) for b, a in zip(record.before, record.after, strict=True)]
    return next((v for v in found if v.outcome is not Outcome.PASS), found[0])


def _light(item: RegisteredPass, record: PassRecord) -> None:
    """Lint, effect, collectives and estimated memory."""
    started = time.perf_counter()
    found = item.effect(record.before, record.after, record.options)
    if all(isinstance(a, GraphModule) for a in record.after):
        record.verdicts.append(_lint(record))
        record.verdicts.append(effect.verdict(found))
        record.verdicts.append(collectives.conserved(record.before, record.after))
        record.verdicts.append(memory.verdict(record.before, record.after))
    else:
        record.verdicts.append(effect.verdict(found))
    record.verify_seconds += time.perf_counter() - started


def _restored(before: Graphs, put: Callable[[int, GraphModule], None]) -> None:
    for i, graph in enumerate(before):
        put(i, aot.clone(graph))


def run_joint(joint: JointGraph, specs: Sequence[PassSpec], *, progress: Callable[[str], None] = lambda _: None) -> list[PassRecord]:
    """Run the joint passes in order, in place; `progress` hears each pass's name before it runs.

    A pass that raises, or whose graph fails lint, leaves `joint.graph` as that pass received it.
    """
    records: list[PassRecord] = []
    before = aot.clone(joint.graph)
    for spec in specs:
        progress(spec.name)
        item = find_pass(spec.name)
        options = _options(item, spec)
        facts = joint.graph.meta["workbench"]
        started = time.perf_counter()
        try:
            result = _checked(spec.name, item.function(joint.graph, [], options=options), lowering=False)
        except BaseException:
            joint.graph = before
            raise
        seconds = time.perf_counter() - started
        result.recompile()
        result.meta["workbench"] = facts
        joint.graph = result
        after = aot.clone(result)
        record = PassRecord(spec.name, Stage.JOINT, options, (before,), (after,), seconds, 0.0)
        _light(item, record)
        records.append(record)
        before = after
    return records


def prove_partition(records: Sequence[PassRecord], pair: ForwardBackward) -> None:
    """Add what the partitioner made of the tags to the records of the passes that set them."""
    graphs = (aot.clone(pair.forward), aot.clone(pair.backward))
    for record in records:
        item = find_pass(record.name)
        if item.partition_effect is not None:
            started = time.perf_counter()
            record.verdicts.append(effect.verdict(item.partition_effect(graphs, record.options)))
            record.verify_seconds += time.perf_counter() - started


def run_partitioned(
    pair: ForwardBackward, specs: Sequence[PassSpec], *, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[PassRecord], tuple[Any, ...] | None]:
    """Run the passes on forward and backward; the second result holds the bodies of a lowering pass, or None."""
    records: list[PassRecord] = []
    before: Graphs = tuple(aot.clone(g) for g in pair.graphs)
    bodies: tuple[Any, ...] | None = None
    for spec in specs:
        progress(spec.name)
        item = find_pass(spec.name)
        options = _options(item, spec)
        lowering = item.contract.stage is Stage.LOWERING
        results = []
        started = time.perf_counter()
        for which in ("forward", "backward"):
            with pair.context(which) as example_inputs:
                graph = getattr(pair, which)
                facts = graph.meta["workbench"]
                given = aot.clone(graph) if lowering else graph  # compilers edit the graph they are given
                result = _checked(spec.name, item.function(given, example_inputs, options=options), lowering)
            if not lowering:
                result.meta["workbench"] = facts
                result.recompile()
                pair.replace(which, result)
            results.append(result)
        seconds = time.perf_counter() - started
        after = tuple(results) if lowering else tuple(aot.clone(g) for g in results)
        record = PassRecord(spec.name, item.contract.stage, options, before, after, seconds, 0.0)
        _light(item, record)
        records.append(record)
        if lowering:
            bodies = after
        else:
            before = after
    return records, bodies


def refuse_divergence(pair: ForwardBackward) -> Verdict:
    """Exchange the ordered list of collectives between the ranks; a difference is refused before any of them runs.

    Every rank must call this. Raises WorkbenchError on every rank, naming the first difference.
    """
    found = collectives.exchange(pair.graphs)
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
    """Bytes that the forward hands to the backward, parameters that live anyway left out."""
    from workbench.forward_backward import saved_nodes

    values = [n.meta.get("val") for n in saved_nodes(*pair.graphs) if n.op != "placeholder"]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
