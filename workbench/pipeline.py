"""The pipeline runs a visible list of passes, and after each says what it did and what it proved."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError
from torch.fx import GraphModule

from workbench import passes as _package_passes  # noqa: F401  registers the package's own
from workbench.analysis.diff import GraphDiff, diff
from workbench.analysis.memory import saved_tensors
from workbench.analysis.snapshot import Snapshot, same_program
from workbench.contracts import Stage
from workbench.errors import WorkbenchError
from workbench.forward_backward import ForwardBackward
from workbench.joint_graph import JointGraph
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

    `before` and `after` are one joint graph, or the forward and the backward; a pass works on a copy, so that both
    stay as they are. Seconds are wall time; copying counts as proving.
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


def _chosen(spec: PassSpec | str, stages: Collection[Stage], where: str) -> tuple[RegisteredPass, Any]:
    """The registered pass and its validated options."""
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


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """The garbage collector waits: little here is garbage, and it would search the whole process for it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def _copy(graph: GraphModule) -> GraphModule:
    """A copy that a pass may change: nodes, metadata and facts, but for what forward and backward share."""
    copy = aot.clone(graph)
    facts = graph.meta.get("workbench") or {}
    copy.meta["workbench"] = {k: v.copy() if k in ("groups", "group_sizes") else v for k, v in facts.items()}
    return copy


def _apply(item: RegisteredPass, given: GraphModule, example_inputs: list[Any], options: Any) -> Any:
    """What the pass returns, checked; its own errors come with its name."""
    lowering, facts = item.contract.stage is Stage.LOWERING, given.meta["workbench"]
    where = f"pass {item.name!r} on the {facts.get('graph', 'joint')} graph"
    try:
        result = item.function(given, example_inputs, options=options)
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"{where} raised {type(error).__name__}: {error}") from error
    if not (callable(result) if lowering else isinstance(result, GraphModule)):
        wanted = "a callable" if lowering else "the GraphModule, also where it was changed in place"
        raise WorkbenchError(f"{where} returned {type(result).__name__}: return {wanted}")
    if not lowering:
        result.meta["workbench"] = facts
        result.recompile()
    return result


def _placed(graph: GraphModule) -> tuple[int, int]:
    """(operator nodes that say where they came from, all operator nodes)."""
    metas = [n.meta for n in graph.graph.nodes if n.op == "call_function"]
    return len([1 for meta in metas if "partitioner_tag" in meta and meta.get("stack_trace")]), len(metas)


class _Seen:
    """What the light checks read from graphs, kept for one run: what one pass leaves is what the next one gets."""

    def __init__(self) -> None:
        self.placed = functools.cache(_placed)
        self._snapshots: dict[Any, Snapshot] = {}
        self._estimates: dict[memory.Graphs, dict[str, int]] = {}

    def take(self, gm: GraphModule | Snapshot) -> Snapshot:
        return self._snapshots.get(gm) or self._snapshots.setdefault(gm, lint.boundary_snapshot(gm))

    def estimate(self, graphs: memory.Graphs) -> dict[str, int]:
        return self._estimates.get(graphs) or self._estimates.setdefault(graphs, memory.estimate(graphs))

    def carry(self, before: Graphs, after: Graphs) -> None:
        """Where the pass only tagged nodes, what was read before holds after."""
        if all(map(same_program, before, after)):
            self._estimates[after] = self.estimate(before)
            for a, b in zip(before, after, strict=True):
                self._snapshots[b] = self.take(a)


def _lint(record: PassRecord, seen: _Seen) -> Verdict:
    found = [lint.lint(record.before, record.after, take=seen.take)]
    if record.stage is Stage.JOINT:
        found += [_metadata(seen.placed(b), seen.placed(a)) for b, a in zip(record.before, record.after, strict=True)]
    return next((v for v in found if v.outcome is not Outcome.PASS), found[0])


_MAY_LOSE = 0.1


def _metadata(before: tuple[int, int], after: tuple[int, int]) -> Verdict:
    """FAIL where a joint pass lost what the partitioner and passes by module go by; a bare retrace loses nearly all."""

    (had, count), (has, now) = before, after
    if not count or not now or has / now >= had / count - _MAY_LOSE:
        return Verdict("lint", Outcome.PASS, "")
    return Verdict("lint", Outcome.FAIL, (
        f"{now - has} of {now} nodes lost their metadata (before: {count - had} of {count} had none): the partitioner "
        "would recompute the whole forward, and passes that go by module would match nothing; copy node.meta"
    ), {"without_metadata": now - has, "nodes": now})


@_uncollected()
def _light(item: RegisteredPass, record: PassRecord, seen: _Seen) -> None:
    """Lint, effect, collectives and estimated memory."""
    started = time.perf_counter()
    found = item.effect(record.before, record.after, record.options)
    if all(isinstance(a, GraphModule) for a in record.after):
        seen.carry(record.before, record.after)
        linted = _lint(record, seen)
        before, after = ([seen.take(g) for g in graphs] for graphs in (record.before, record.after))
        record.verdicts += [linted, effect.verdict(found), collectives.conserved(before, after),
                            memory.verdict(record.before, record.after, estimate=seen.estimate)]
    else:
        record.verdicts.append(effect.verdict(found))
    record.verify_seconds += time.perf_counter() - started


def run_joint(
    joint: JointGraph, specs: Sequence[PassSpec | str], *, progress: Callable[[str], None] = lambda _: None
) -> list[PassRecord]:
    """Run the joint passes in order, in place; `progress` hears each pass's name before it runs.

    `specs` are a recipe's, or names. Each pass works on a copy: one that raises leaves `joint.graph` as that pass
    received it. Raises WorkbenchError where a pass is unknown, raises, or returns no graph.
    """
    joint.require_open()
    chosen = [_chosen(spec, (Stage.JOINT,), "run_joint") for spec in specs]
    records: list[PassRecord] = []
    seen = _Seen()
    for item, options in chosen:
        progress(item.name)
        before = joint.graph
        started = time.perf_counter()
        given = _copy(before)
        cloned = time.perf_counter()
        with joint.context():
            after = _apply(item, given, joint.example_inputs, options)
        seconds = time.perf_counter() - cloned
        joint.graph = after
        record = PassRecord(item.name, Stage.JOINT, options, (before,), (after,), seconds, cloned - started)
        _light(item, record, seen)
        records.append(record)
    return records


def prove_partition(records: Sequence[PassRecord], pair: ForwardBackward) -> None:
    """Add what the partitioner made of the tags to the records of the passes that set them."""
    for record in records:
        item, said = find_pass(record.name), record.verdict("effect")
        idle = said is not None and said.outcome is Outcome.NO_EFFECT  # it has said why
        if item.partition_effect is not None and not idle:
            started = time.perf_counter()
            record.verdicts.append(effect.verdict(item.partition_effect(pair.graphs, record.options)))
            record.verify_seconds += time.perf_counter() - started


def run_partitioned(
    pair: ForwardBackward, specs: Sequence[PassSpec | str], *, progress: Callable[[str], None] = lambda _: None
) -> tuple[list[PassRecord], tuple[Any, ...] | None]:
    """Run the passes on forward and backward; the second result holds the bodies of a lowering pass, or None.

    A pass that raises, on either graph, leaves both as it received them.
    """
    chosen = [_chosen(spec, (Stage.PARTITIONED, Stage.LOWERING), "run_partitioned") for spec in specs]
    records: list[PassRecord] = []
    bodies: tuple[Any, ...] | None = None
    seen = _Seen()
    for item, options in chosen:
        progress(item.name)
        before, stage = pair.graphs, item.contract.stage
        results, seconds, copying = [], 0.0, 0.0
        for which, graph in zip(("forward", "backward"), before, strict=True):
            started = time.perf_counter()
            given = _copy(graph)
            cloned = time.perf_counter()
            with pair.context(which) as example_inputs:
                results.append(_apply(item, given, list(example_inputs), options))
            copying, seconds = copying + cloned - started, seconds + time.perf_counter() - cloned
        after = tuple(results)
        if stage is Stage.LOWERING:
            bodies = after
        else:
            for which, result in zip(("forward", "backward"), after, strict=True):
                pair.replace(which, result)
        record = PassRecord(item.name, stage, options, before, after, seconds, copying)
        _light(item, record, seen)
        records.append(record)
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
    """Bytes that live between forward and backward because they are saved: each storage once, inputs left out."""
    return sum(row.held_bytes for row in saved_tensors(*pair.graphs))
