"""What one pass of one run did and proved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from workbench.checks.verdicts import Outcome, Verdict, verdict_of, worst
from workbench.graph.read.diff import GraphDiff, diff
from workbench.passes.registry import Graphs
from workbench.recipe.contracts import Stage


@dataclass
class PassRecord:
    """One pass of one run: its input, its output, how long it took and what was proved.

    `before` and `after` are one joint graph, the forward and the backward, or the whole step. A pass works on a copy,
    so both stay unchanged. Seconds are wall time; copying the graph counts as verification. compiled, replayed: whether
    the step that was built is lowered by a compiler, and launched as CUDA graphs; replayed is None if none was built.
    """

    name: str
    stage: Stage
    options: Any
    before: Graphs
    after: tuple[Any, ...]
    seconds: float
    verify_seconds: float
    verdicts: list[Verdict] = field(default_factory=list)
    compiled: bool = False
    replayed: bool | None = None
    _diffs: list[GraphDiff] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def at_capture(self) -> bool:
        """Whether the capture had done the pass's work, so that `before` is no graph to compare `after` with."""
        return getattr(self.options, "at_capture", False)

    @property
    def outcome(self) -> Outcome:
        return worst(self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The verdict of that check by `verdict_of`; None where it did not run."""
        return verdict_of(self.verdicts, check)

    def diffs(self) -> list[GraphDiff]:
        """What the pass added, removed and moved in each graph; empty for a lowering pass."""
        if any(not isinstance(a, GraphModule) for a in self.after):
            return []
        if self._diffs is None:
            self._diffs = [diff(b, a) for b, a in zip(self.before, self.after, strict=True)]
        return self._diffs

    def tagged(self) -> list[dict[str, str]]:
        """For each graph: the nodes whose recomputation tag the pass changed, with the new tag."""
        found = []
        for before, after in zip(self.before, self.after, strict=False):
            graphs = [{n.name: getattr(n.meta.get("recompute"), "name", "none") for n in gm.graph.nodes}
                      for gm in (before, after) if isinstance(gm, GraphModule)]
            found.append({name: tag for name, tag in graphs[1].items() if graphs[0].get(name, "none") != tag}
                         if len(graphs) == 2 else {})
        return found

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its graphs: ("joint",), ("forward", "backward"), or ("step",)."""
        if len(self.before) == 2:
            return ("forward", "backward")
        return ("joint",) if self.stage is Stage.JOINT else ("step",)

    def __repr__(self) -> str:
        return f"PassRecord({self.name}, {self.stage}, {self.outcome}: {'; '.join(map(str, self.verdicts))})"
