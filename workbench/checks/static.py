"""Level light: lint, effect, collectives and estimated memory of one pass, each graph read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from workbench.checks import collectives, effect, lint, memory
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import UnusableGraph, WorkbenchError, no_exit, place_of
from workbench.graph.facts import facts_of
from workbench.graph.read.snapshot import Snapshot, same_program
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs
from workbench.recipe.contracts import PassContract, Stage
from workbench.torch_api.garbage import uncollected

EffectPredicate = Callable[[Any, Any, Any], Effect]


def _placed(graph: GraphModule) -> tuple[int, int]:
    """(operator nodes that say where they came from, all operator nodes)."""
    metas = [n.meta for n in graph.graph.nodes if n.op == "call_function"]
    return len([1 for meta in metas if "partitioner_tag" in meta and meta.get("stack_trace")]), len(metas)


class Seen:
    """What the light checks read from graphs, kept for one run: what one pass leaves is what the next one gets."""

    def __init__(self) -> None:
        self._placed: dict[GraphModule, tuple[int, int]] = {}
        self._snapshots: dict[Any, Snapshot] = {}
        self._estimates: dict[Graphs, dict[str, int]] = {}

    def take(self, gm: GraphModule | Snapshot) -> Snapshot:
        return self._snapshots.get(gm) or self._snapshots.setdefault(gm, lint.boundary_snapshot(gm))

    def estimate(self, graphs: Graphs) -> dict[str, int]:
        return self._estimates.get(graphs) or self._estimates.setdefault(graphs, memory.estimate(graphs))

    def placed(self, gm: GraphModule) -> tuple[int, int]:
        return self._placed.get(gm) or self._placed.setdefault(gm, _placed(gm))

    def of(self, graphs: Graphs) -> Seen:
        """What is known of these graphs alone, so that the others can go."""
        kept = Seen()
        kept._placed |= {gm: self._placed[gm] for gm in graphs if gm in self._placed}
        kept._snapshots |= {gm: self._snapshots[gm] for gm in graphs if gm in self._snapshots}
        kept._estimates |= {graphs: self._estimates[graphs]} if graphs in self._estimates else {}
        return kept

    def carry(self, before: Graphs, after: Graphs) -> None:
        """Where the pass only tagged nodes, what was read before holds after."""
        if all(map(same_program, before, after)):
            self._estimates[after] = self.estimate(before)
            for a, b in zip(before, after, strict=True):
                self._snapshots[b] = self.take(a)


def _lint(record: PassRecord, seen: Seen) -> Verdict:
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


def unusable(record: PassRecord) -> UnusableGraph | None:
    """What to raise where a later stage is given the graphs of this record; None where it can take them."""
    found = record.verdict("lint")
    return UnusableGraph(record.name, found.message) if found and found.evidence.get("unusable") else None


def _untouched(before: Any, after: Any) -> bool:
    """The same program with the same metadata and facts; never so of callables, which cannot be compared."""
    if not isinstance(before, GraphModule) or not isinstance(after, GraphModule) or not same_program(before, after):
        return False
    pairs: list[tuple[Any, Any]] = [(facts_of(before), facts_of(after))]
    pairs += [(a.meta, b.meta) for a, b in zip(before.graph.nodes, after.graph.nodes, strict=True)]
    return all(_equal(a, b) for a, b in pairs)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # tensors or arrays, which a pass made anew
        return False


def _asked(predicate: EffectPredicate, contract: PassContract, record: PassRecord) -> Effect:
    """What the pass's own predicate says; a user's is not believed where nothing is another than before."""
    try:
        told = predicate(record.before, record.after, record.options)
        if told.happened and contract.source == "user" and all(map(_untouched, record.before, record.after)):
            return Effect(False, "its predicate says that it happened, and no node, argument or metadata is another "
                          "than before: let the predicate compare the two graphs", told.evidence)
        return told
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"the effect of pass {record.name!r} raised {type(error).__name__}: {error}"
                             f"{place_of(error)}") from error


@no_exit()
@uncollected()
def check(predicate: EffectPredicate, contract: PassContract, record: PassRecord, seen: Seen) -> None:
    """Lint, effect, collectives and estimated memory; of a malformed graph lint alone."""
    started = time.perf_counter()
    graphs = all(isinstance(a, GraphModule) for a in record.after)
    if graphs:
        seen.carry(record.before, record.after)
        record.verdicts.append(_lint(record, seen))
    if graphs and record.verdicts[-1].evidence.get("malformed"):
        record.verdicts += [Verdict(check, Outcome.UNKNOWN, lint.MALFORMED)
                            for check in ("effect", "collectives", "memory")]
    else:
        found = effect.verdict(_asked(predicate, contract, record))
        if graphs:
            before, after = ([seen.take(g) for g in sides] for sides in (record.before, record.after))
            record.verdicts += [found, collectives.conserved(before, after, fewer=contract.fewer_bytes),
                                memory.verdict(record.before, record.after, estimate=seen.estimate)]
        else:
            record.verdicts.append(found)
    record.verify_seconds += time.perf_counter() - started
