"""Estimated memory before and after a pass, and the step's predicted peak against the measured one."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import facts_of
from workbench.graph.read.memory import live_bytes, saved_tensors
from workbench.graph.saving.peak import StepPeak
from workbench.passes.registry import Graphs


def estimate(graphs: Graphs) -> dict[str, int]:
    """`peak_<graph>` bytes for each graph, and `saved` bytes where both forward and backward are given."""
    names = [facts_of(graphs[0]).part] if len(graphs) == 1 else ["forward", "backward"]
    peaks = {f"peak_{name}": live_bytes(gm).peak_bytes for name, gm in zip(names, graphs, strict=True)}
    if len(graphs) == 2:
        peaks["saved"] = sum(row.held_bytes for row in saved_tensors(*graphs))
    return peaks


WITHIN = 0.05


def peak(predicted: StepPeak | None, measured: int | None, why: str) -> Verdict:
    """PASS where the measured peak is within 5 % of the predicted one; else UNKNOWN: the prediction misses something.

    predicted: None for a step without graphs, as an artifact runs it. measured: bytes of the CUDA allocator's peak, or
    None, and `why`. The evidence names the holders of the peak.
    """
    gib = 2**30
    if predicted is None:
        if measured is None:
            return Verdict("memory", Outcome.UNKNOWN, why)
        return Verdict("memory", Outcome.PASS, f"peak {measured / gib:.2f} GiB measured",
                       {"peak_bytes": measured, "kind": "measured"})
    evidence = {"predicted_bytes": predicted.bytes, "resident_bytes": predicted.resident, "phase": predicted.phase,
                "holders": [list(holder) for holder in predicted.holders], "kind": "predicted"}
    text = f"{predicted.bytes / gib:.2f} GiB predicted, in the {predicted.phase}"
    if measured is None:
        return Verdict("memory", Outcome.UNKNOWN, why, evidence)
    off = predicted.bytes / measured - 1
    evidence |= {"peak_bytes": measured, "off": round(off, 4), "kind": "measured"}
    text = f"peak {measured / gib:.2f} GiB measured, {text} ({off:+.1%})"
    if abs(off) <= WITHIN:
        return Verdict("memory", Outcome.PASS, text, evidence)
    return Verdict("memory", Outcome.UNKNOWN, f"{text}: the prediction misses what holds the difference", evidence)


def verdict(was: Mapping[str, int], now: Mapping[str, int]) -> Verdict:
    """PASS with the estimates before and after a pass; the message states every figure that changed."""
    evidence = {"before": was, "after": now, "kind": "estimated in node order"}
    changes = [f"{key} {was[key]:,} to {now[key]:,} bytes" for key in was if key in now and was[key] != now[key]]
    return Verdict("memory", Outcome.PASS, "estimated: " + ("; ".join(changes) or "unchanged"), evidence)
