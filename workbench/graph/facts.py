"""What is known of a graph beside its nodes, and what the stages of one step tell each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.fx import GraphModule

from workbench.graph.saving.plan import MemoryPlan

Part = Literal["joint", "forward", "backward", "step", "graph"]
_KEY = "workbench_facts"


@dataclass(frozen=True)
class ChosenOrder:
    """The order that the pass `by` chose for the collectives, by the costs that `costs(graph)` gives.

    hidden: each collective with compute between launch and wait, as "PART NODE", and how many matmuls and attentions
    are there. device: of the costs, and what is known of their error.
    """

    by: str
    costs: Callable[[GraphModule], Any] = field(repr=False)
    hidden: dict[str, int] = field(repr=False)
    device: str = ""


@dataclass
class StepFacts:
    """What the stages of one step tell each other. Forward and backward share one; a fork of the pair has its own, and
    so has the whole step in one graph.

    The partitioner states results (outputs of the step that the forward returns, before the saved tensors),
    saved_order (for each input of the backward before the tangents, its place among the saved tensors; None for their
    own order) and captured_regions (names of the regions of each direction, before torch's CSE merged nodes).

    Join states saved_names (nodes of the whole step that its forward saved, for each microbatch).
    The check of the order states order. Passes state the rest: regions (names that the forward had), gather_groups
    (process group to its twin for all-gathers), offloaded (places among the saved tensors of those on the host),
    forward_strides (of each output of the lowered forward), estimates (milliseconds by node), recorder and
    replayed_forward (of CUDA graphs: forward and backward record into one memory pool).
    """

    results: int = 0
    saved_order: tuple[int, ...] | None = None
    saved_names: frozenset[str] = frozenset()
    captured_regions: dict[str, list[str]] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    gather_groups: dict[str, str] = field(default_factory=dict)
    offloaded: tuple[int, ...] = ()
    forward_strides: list[tuple[int, ...] | None] = field(default_factory=list)
    estimates: dict[str, float] = field(default_factory=dict)
    order: ChosenOrder | None = None
    recorder: Any = None
    replayed_forward: Callable[[list[Any]], Any] | None = None

    def fork(self) -> StepFacts:
        return replace(self, gather_groups=dict(self.gather_groups), estimates=dict(self.estimates))


@dataclass
class GraphFacts:
    """What passes and checks may read of one graph's surroundings.

    groups: mesh axis to process group, where `dp_shard.gather` is a second group of the axis dp_shard. group_sizes:
    process group to its number of ranks. world: the kind of world. buckets: module paths of the model's blocks. traced:
    whether make_fx made the graph, which then has no partitioner. plan: what the pass memory_budget chose to save.
    """

    part: Part = "graph"
    groups: dict[str, str] = field(default_factory=dict)
    group_sizes: dict[str, int] = field(default_factory=dict)
    world: str = "one process"
    buckets: list[Any] = field(default_factory=list)
    step: StepFacts = field(default_factory=StepFacts, repr=False)
    traced: bool = False
    plan: MemoryPlan | None = field(default=None, repr=False)

    def of(self, part: Part, step: StepFacts | None = None) -> GraphFacts:
        """A copy for another graph of the same step; `step`, where not given, stays the same object."""
        return replace(self, part=part, groups=dict(self.groups), group_sizes=dict(self.group_sizes),
                       buckets=list(self.buckets), step=step or self.step)


def facts_of(graph: GraphModule) -> GraphFacts:
    """The facts of a graph; empty ones for a graph that was not captured here."""
    found: GraphFacts | None = graph.meta.get(_KEY)
    return found or GraphFacts()


def set_facts(graph: GraphModule, facts: GraphFacts) -> None:
    graph.meta[_KEY] = facts
