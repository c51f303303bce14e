"""Whether the pass had its intended effect."""

from __future__ import annotations

from workbench.checks.verdicts import Outcome, Verdict
from workbench.passes.effect import Effect


def verdict(effect: Effect) -> Verdict:
    """PASS if the effect happened, else NO_EFFECT, or UNKNOWN if it cannot be known yet, with the reason."""
    outcome = Outcome.UNKNOWN if effect.happened is None else Outcome.PASS if effect.happened else Outcome.NO_EFFECT
    idle = "nothing changed, and the pass gives no reason" if outcome is Outcome.NO_EFFECT else ""
    return Verdict("effect", outcome, effect.reason or idle, effect.evidence)
