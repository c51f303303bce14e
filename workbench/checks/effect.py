"""Whether the pass had its intended effect."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.checks.snapshot import same_program
from workbench.checks.verdicts import Outcome, Verdict
from workbench.errors import WorkbenchError, place_of
from workbench.graph.facts import facts_of
from workbench.passes.effect import Effect
from workbench.passes.registry import RegisteredPass


def verdict(effect: Effect) -> Verdict:
    """PASS if the effect happened, else NO_EFFECT, or UNKNOWN if it cannot be known yet, with the reason."""
    outcome = Outcome.UNKNOWN if effect.happened is None else Outcome.PASS if effect.happened else Outcome.NO_EFFECT
    idle = "nothing changed, and the pass gives no reason" if outcome is Outcome.NO_EFFECT else ""
    return Verdict("effect", outcome, effect.reason or idle, effect.evidence)


def of_graphs(
    item: RegisteredPass, before: tuple[Any, ...], after: tuple[Any, ...], options: Any
) -> Effect:
    """The effect by the pass's own predicate; where nothing changed, that of a user's pass is rejected."""
    try:
        effect = item.effect(before, after, options)
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
    pairs: list[tuple[Any, Any]] = [(facts_of(before), facts_of(after))]
    pairs += [(a.meta, b.meta) for a, b in zip(before.graph.nodes, after.graph.nodes, strict=True)]
    return all(_equal(a, b) for a, b in pairs)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, ValueError, TypeError):  # tensors or arrays that a pass created
        return False
