"""Estimated memory before and after a pass: peak in node order, and what is saved between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.facts import facts_of
from workbench.graph.read.memory import live_bytes, saved_tensors
from workbench.passes.registry import Graphs


def estimate(graphs: Graphs) -> dict[str, int]:
    """`peak_<graph>` bytes for each graph, and `saved` bytes where both forward and backward are given."""
    names = [facts_of(graphs[0]).part] if len(graphs) == 1 else ["forward", "backward"]
    peaks = {f"peak_{name}": live_bytes(gm).peak_bytes for name, gm in zip(names, graphs, strict=True)}
    if len(graphs) == 2:
        peaks["saved"] = sum(row.held_bytes for row in saved_tensors(*graphs))
    return peaks


def verdict(was: Mapping[str, int], now: Mapping[str, int]) -> Verdict:
    """PASS with the estimates before and after a pass; the message states every figure that changed."""
    evidence = {"before": was, "after": now, "kind": "estimated in node order"}
    changes = [f"{key} {was[key]:,} to {now[key]:,} bytes" for key in was if key in now and was[key] != now[key]]
    return Verdict("memory", Outcome.PASS, "estimated: " + ("; ".join(changes) or "unchanged"), evidence)
