"""Level light: lint, effect, collectives and estimated memory of one pass, each graph read once."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.fx import GraphModule

from workbench.checks import collectives, effect, lint, memory
from workbench.checks.record import PassRecord
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import UnusableGraph, WorkbenchError, no_exit, place_of
from workbench.graph.facts import facts_of
from workbench.graph.read.collectives import Collective
from workbench.graph.read.snapshot import same_program, snapshot
from workbench.passes.effect import Effect
from workbench.passes.registry import EffectPredicate, Graphs
from workbench.recipe.contracts import PassContract, Stage
from workbench.torch_api.garbage import uncollected

G = TypeVar("G")
T = TypeVar("T")


def _placed(graph: GraphModule) -> tuple[int, int, int]:
    """(operator nodes with a partitioner tag, those of them with a stack trace, all operator nodes)."""
    metas = [n.meta for n in graph.graph.nodes if n.op == "call_function"]
    tagged = [meta for meta in metas if "partitioner_tag" in meta]
    return len(tagged), len([1 for meta in tagged if meta.get("stack_trace")]), len(metas)


class Seen:
    """What the light checks have read from graphs. Each graph is read once: a pass's output is the next one's input."""

    def __init__(self) -> None:
        self._known: dict[tuple[Callable[..., Any], Any], Any] = {}

    def __call__(self, read: Callable[[G], T], graphs: G) -> T:
        """`read(graphs)`, from memory the second time; `graphs` is one graph or a tuple of them."""
        if (read, graphs) not in self._known:
            self._known[read, graphs] = read(graphs)
        found: T = self._known[read, graphs]
        return found

    def collectives(self, graphs: Graphs) -> list[Collective]:
        return [c for gm in graphs for c in self(snapshot, gm).collectives]

    def of(self, graphs: Graphs) -> Seen:
        """What is known of these graphs alone, so that the others can be freed."""
        kept = Seen()
        kept._known = {key: found for key, found in self._known.items() if key[1] in (graphs, *graphs)}
        return kept

    def carry(self, before: Graphs, after: Graphs) -> None:
        """Where the pass only tagged nodes, what was read before still holds."""
        if all(map(same_program, before, after)):
            self._known[memory.estimate, after] = self(memory.estimate, before)
            self._known |= {(snapshot, a): self(snapshot, b) for b, a in zip(before, after, strict=True)}


def _lint(record: PassRecord, seen: Seen) -> Verdict:
    found = [lint.lint(record.before, record.after, partial(seen, snapshot))]
    if record.stage is Stage.JOINT:
        found += [_metadata(seen(_placed, b), seen(_placed, a))
                  for b, a in zip(record.before, record.after, strict=True)]
    return next((v for v in found if v.outcome is not Outcome.PASS), found[0])


_MAY_LOSE = 0.1


def _metadata(before: tuple[int, int, int], after: tuple[int, int, int]) -> Verdict:
    """FAIL where a joint pass lost tags and stack traces, as a retrace does: the partitioner and passes need them.

    Code without a source file (`python -c`, a prompt) has no stack traces. A pass that replaces such a node by several
    has as many nodes with a trace as before, and has lost none.
    """
    (tags, traces, count), (has_tags, has_traces, now) = before, after

    def fell(had: int, has: int) -> bool:
        return bool(count and now) and has / now < had / count - _MAY_LOSE

    if not fell(tags, has_tags) and (has_traces >= traces or not fell(traces, has_traces)):
        return Verdict("lint", Outcome.PASS, "")
    return Verdict("lint", Outcome.FAIL, (
        f"{now - has_traces} of {now} nodes lost their metadata (before: {count - traces} of {count} had none): the "
        "partitioner would recompute the whole forward, and passes that go by module would match nothing; copy "
        "node.meta"
    ), {"without_metadata": now - has_traces, "nodes": now})


def unusable(record: PassRecord) -> UnusableGraph | None:
    """The error for a later stage that is given the graphs of this record; None where it can take them."""
    found = record.verdict("lint")
    return UnusableGraph(record.name, found.message) if found and found.evidence.get("unusable") else None


def _untouched(before: Any, after: Any) -> bool:
    """Whether program, metadata and facts are the same; False for callables, which cannot be compared."""
    if not isinstance(before, GraphModule) or not isinstance(after, GraphModule) or not same_program(before, after):
        return False
    pairs: list[tuple[Any, Any]] = [(facts_of(before), facts_of(after))]
    pairs += [(a.meta, b.meta) for a, b in zip(before.graph.nodes, after.graph.nodes, strict=True)]
    return all(_equal(a, b) for a, b in pairs)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # tensors or arrays that a pass created
        return False


def _asked(predicate: EffectPredicate, contract: PassContract, record: PassRecord) -> Effect:
    """The effect by the pass's own predicate; where nothing changed, that of a user's pass is rejected."""
    try:
        told = predicate(record.before, record.after, record.options)
        if told.happened and contract.source == "user" and all(map(_untouched, record.before, record.after)):
            return Effect(False, "its predicate claims an effect, and no node, argument or metadata changed: let the "
                          "predicate compare the two graphs", told.evidence)
        return told
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(f"the effect of pass {record.name!r} raised {type(error).__name__}: {error}"
                             f"{place_of(error)}") from error


@no_exit()
@uncollected()
def check(predicate: EffectPredicate, contract: PassContract, record: PassRecord, seen: Seen,
          promised: Callable[[Graphs, Any], list[Collective]] | None = None) -> None:
    """Add the verdicts of lint, effect, collectives and estimated memory; of a malformed graph only lint runs.

    promised: the collectives that the pass should leave, where these are not those that it received.
    """
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
            was, now = (seen.collectives(graphs) for graphs in (record.before, record.after))
            moves = (collectives.conserved(was, now, fewer=contract.fewer_bytes) if promised is None
                     else collectives.kept_promise(was, promised(record.before, record.options), now))
            record.verdicts += [found, moves,
                                memory.verdict(*(seen(memory.estimate, g) for g in (record.before, record.after)))]
        else:
            record.verdicts.append(found)
    record.verify_seconds += time.perf_counter() - started
