"""Estimated memory before and after a pass: peak in node order, and what is saved between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.checks.verdicts import Outcome, Verdict
from workbench.graph.read.memory import live_bytes, saved_tensors
from workbench.passes.registry import Graphs


def estimate(graphs: torch.fx.GraphModule | Graphs) -> dict[str, int]:
    """`peak_<graph>` bytes for each graph, and `saved` bytes where both forward and backward are given."""
    found = [graphs] if isinstance(graphs, torch.fx.GraphModule) else list(graphs)
    names = ["joint"] if len(found) == 1 else ["forward", "backward"]
    peaks = {f"peak_{name}": live_bytes(g).peak_bytes for name, g in zip(names, found, strict=True)}
    if len(found) == 2:
        peaks["saved"] = sum(row.held_bytes for row in saved_tensors(found[0], found[1]))
    return peaks


def verdict(
    before: Graphs, after: Graphs, promised: str | None = None, estimate: Callable[[Graphs], dict[str, int]] = estimate
) -> Verdict:
    """PASS with both estimates. `promised` names one that the pass says it lowers: FAIL where it rises.

    Promised or not, the message states what rose, so that no rise goes unseen.
    """
    was, now = estimate(before), estimate(after)
    evidence: dict[str, Any] = {"before": was, "after": now, "kind": "estimated in node order"}
    if promised is not None and now.get(promised, 0) > was.get(promised, 0):
        return Verdict("memory", Outcome.FAIL, f"the pass promises a lower {promised}, and it rose from "
                       f"{was[promised]:,} to {now[promised]:,} bytes", evidence)
    changes = [f"{key} {was[key]:,} to {now[key]:,} bytes" for key in was if key in now and was[key] != now[key]]
    return Verdict("memory", Outcome.PASS, "estimated: " + ("; ".join(changes) or "unchanged"), evidence)
