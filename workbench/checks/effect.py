"""Did the pass do what it was listed for."""

from __future__ import annotations

from workbench.checks.verdicts import Outcome, Verdict
from workbench.passes.effect import Effect


def verdict(effect: Effect) -> Verdict:
    """PASS if the effect happened, else NO_EFFECT, or UNKNOWN if it cannot be known yet, with the reason."""
    if effect.happened is None:
        return Verdict("effect", Outcome.UNKNOWN, effect.reason, effect.evidence)
    if effect.happened:
        return Verdict("effect", Outcome.PASS, effect.reason, effect.evidence)
    reason = effect.reason or "nothing changed, and the pass gives no reason"
    return Verdict("effect", Outcome.NO_EFFECT, reason, effect.evidence)
