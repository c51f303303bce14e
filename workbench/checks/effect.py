"""Whether the pass had its intended effect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, starmap
from typing import Any

from torch.fx import GraphModule

from workbench.checks.snapshot import same_program
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError, place_of
from workbench.graph.facts import facts_of
from workbench.passes.effect import Effect
from workbench.passes.registry import RegisteredPass, graph_changed
from workbench.recipe.wording import counted


def verdict(effect: Effect) -> Verdict:
    """PASS if the effect happened, else NO_EFFECT, or UNKNOWN if it cannot be known yet, with the reason."""
    outcome = Outcome.UNKNOWN if effect.happened is None else Outcome.PASS if effect.happened else Outcome.NO_EFFECT
    idle = "nothing changed, and the pass gives no reason" if outcome is Outcome.NO_EFFECT else ""
    return Verdict("effect", outcome, effect.reason or idle, effect.evidence)


def of_graphs(
    item: RegisteredPass, before: tuple[Any, ...], after: tuple[Any, ...], options: Any
) -> Effect:
    """The effect by the pass's own predicate; where nothing changed, that of a user's pass is rejected.

    What a pass without a predicate did to metadata alone is unknown.
    """
    try:
        effect = item.effect(before, after, options)
        if not effect.happened and item.effect is graph_changed and (tags := _tags(before, after)):
            return Effect(None, tags, effect.evidence)
        if effect.happened and item.contract.source == "user" and all(map(_untouched, before, after)):
            return Effect(False, "its predicate claims an effect, and no node, argument or metadata changed: let the "
                          "predicate compare the two graphs", effect.evidence)
        return effect
    except WorkbenchError:
        raise
    except Exception as error:
        raise WorkbenchError(
            f"the effect of pass {item.name!r} raised {type(error).__name__}: {error}"
            f"{place_of(error)}"
        ) from error


def _untouched(before: Any, after: Any) -> bool:
    """Whether program, metadata and facts are the same; False for callables, which cannot be compared."""
    if not isinstance(before, GraphModule) or not isinstance(after, GraphModule) or not same_program(before, after):
        return False
    return _equal(facts_of(before), facts_of(after)) and not any(_changed_keys(before, after))


def _changed_keys(before: GraphModule, after: GraphModule) -> Iterator[set[str]]:
    """For each node, the keys under which its metadata is another."""
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        keys = old.meta.keys() | new.meta.keys()
        yield {key for key in keys if not _equal(old.meta.get(key), new.meta.get(key))}


def _tags(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """What became of the metadata of graphs whose nodes are as they were; "" where nothing did."""
    if not all(isinstance(graph, GraphModule) for graph in (*before, *after)):
        return ""
    pairs = zip(before, after, strict=True)
    changed = list(filter(None, chain.from_iterable(starmap(_changed_keys, pairs))))
    keys = ", ".join(sorted(set().union(*changed)))
    of_nodes = f"the metadata {keys} of {counted(len(changed), 'node')} is"
    return f"no node is another, and {of_nodes}: a later pass may read it" if changed else ""


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # tensors or arrays that a pass created
        return False
