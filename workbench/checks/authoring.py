"""Whether a model was put on its mesh rightly: what its gradients showed, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import Known


@dataclass(frozen=True)
class Authoring:
    """What one step has shown of how the model was put on its mesh.

    replicas: gradients with replicas on other ranks. problems: a sentence for each that is wrong. unknown: why the
    plain module was not compared, where that was asked for. compared: whether it was. uncut: whether no parameter is
    cut over the tensor-parallel axis.
    """

    replicas: int
    problems: tuple[str, ...] = ()
    unknown: str = ""
    compared: bool = False
    uncut: bool = False


def check_authoring(known: Known) -> list[Verdict]:
    """Whether the model was put on its mesh rightly, by one step's gradients."""
    facts: Authoring | None = known.authoring
    if facts is None:
        return []
    verdicts = []
    if facts.uncut:
        idle = "the plan cuts no parameter over the axis tp: its ranks hold and compute the same"
        verdicts.append(Verdict("authoring", Outcome.NO_EFFECT, idle))
    equal = "no gradient is held by several ranks"
    if facts.replicas:
        equal = f"{facts.replicas} gradients are equal on all ranks that hold them"
    if facts.problems:
        more = f" (and {len(facts.problems) - 1} more)" if facts.problems[1:] else ""
        verdicts.append(Verdict("authoring", Outcome.FAIL, facts.problems[0] + more))
    elif facts.unknown:
        reason = f"{equal}; not compared with the plain module: {facts.unknown}"
        verdicts.append(Verdict("authoring", Outcome.UNKNOWN, reason))
    elif facts.compared:
        same = f"loss and gradients as the plain module's on all batches; {equal}"
        verdicts.append(Verdict("authoring", Outcome.PASS, same))
    elif facts.replicas:
        verdicts.append(Verdict("authoring", Outcome.PASS, equal))
    return verdicts
