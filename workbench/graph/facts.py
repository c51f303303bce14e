"""What is known of a graph beside its nodes, what the stages of a step tell each other, and what a run has learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import GraphModule

from workbench.recipe.contracts import Stage

Part = Literal["joint", "forward", "backward", "step", "graph"]
_KEY = "workbench_facts"
T = TypeVar("T")


class Order(Protocol):
    """An order of the collectives that a pass chose, and the checks on it: a `ChosenOrder` of checks/order.py."""

    hidden: dict[str, int]

    def verdict(self) -> Any: ...

    def kept_after(self, graphs: tuple[GraphModule, ...]) -> Any: ...

    def kept_in_code(self, graphs: tuple[GraphModule, ...], compiled: tuple[Any, ...]) -> Any: ...

    def in_profile(self, step: Any, ranks: list[dict[str, float]]) -> Any: ...


@dataclass
class StepFacts:
    """What the stages of one step tell each other. Forward and backward share one; a fork of the pair has its own, and
    so has the whole step in one graph.

    The partitioner states results (outputs of the step that the forward returns, before the saved tensors),
    saved_order (for each input of the backward before the tangents, its place among the saved tensors; None for their
    own order) and captured_regions (names of the regions of each direction, before torch's CSE merged nodes).

    A plugin's kind of step states saved_names (nodes of the whole step that its forward saved); `run_partitioned`
    states the order in force. Passes state the rest: regions (names that the forward had), gather_groups (process group
    to its twin for all-gathers), offloaded (places among the saved tensors of those on the host), forward_strides (of
    each output of the lowered forward), recorder and replayed_forward (of CUDA graphs: forward and backward record into
    one memory pool).
    """

    results: int = 0
    saved_order: tuple[int, ...] | None = None
    saved_names: frozenset[str] = frozenset()
    captured_regions: dict[str, list[str]] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    gather_groups: dict[str, str] = field(default_factory=dict)
    offloaded: tuple[int, ...] = ()
    forward_strides: list[tuple[int, ...] | None] = field(default_factory=list)
    order: Order | None = None
    recorder: Any = None
    replayed_forward: Callable[[list[Any]], Any] | None = None

    def fork(self) -> StepFacts:
        return replace(self, gather_groups=dict(self.gather_groups))


@dataclass
class GraphFacts:
    """What passes and checks may read of one graph's surroundings.

    groups: mesh axis to process group, where `dp_shard.gather` is a second group of the axis dp_shard. group_sizes:
    process group to its number of ranks. world: the kind of world. buckets: module paths of the model's blocks.
    partitioner: whether torch's will decide what has no tag. partition_options: of torch._functorch.config, which a
    joint pass wants around the partition. plan: what that pass expects of it, for the pass's own check.
    """

    part: Part = "graph"
    groups: dict[str, str] = field(default_factory=dict)
    group_sizes: dict[str, int] = field(default_factory=dict)
    world: str = "one process"
    buckets: list[Any] = field(default_factory=list)
    step: StepFacts = field(default_factory=StepFacts, repr=False)
    partitioner: bool = True
    partition_options: dict[str, Any] = field(default_factory=dict)
    plan: Any = field(default=None, repr=False)

    def of(self, part: Part, step: StepFacts | None = None) -> GraphFacts:
        """A copy for another graph of the same step; `step`, where not given, stays the same object."""
        return replace(self, part=part, groups=dict(self.groups), group_sizes=dict(self.group_sizes),
                       buckets=list(self.buckets), partition_options=dict(self.partition_options),
                       step=step or self.step)


def facts_of(graph: GraphModule) -> GraphFacts:
    """The facts of a graph; empty ones for a graph that was not captured here."""
    facts: GraphFacts | None = graph.meta.get(_KEY)
    return facts or GraphFacts()


def set_facts(graph: GraphModule, facts: GraphFacts) -> None:
    graph.meta[_KEY] = facts


@dataclass
class Known:
    """What the stages of one run have made and measured, for the checks. None, or empty: not yet, or not asked for.

    records: of all passes so far, in order.
    joint, partitioned: the graph that the partitioner received, and the forward and backward that it made.
    checks: on the step, of the plugins whose capture or kind of step made it.
    bodies: what the last lowering or replay pass made of the graphs.
    built: whether a step was built.
    no_values: why no values can be compared.
    compared: the whole list against eager, each rank's `Comparison`.
    side_effects: Python objects that the forward changes and a compiled step does not, and why no comparison tells.
    authoring: the Authoring of checks/authoring.py, of the last step that ran for it.
    ran: operators, or kernels, of one step by name, with counts.
    profile: the order that a pass chose, a step as this rank's GPU ran it (StepTimeline), and the milliseconds that the
    collectives of each rank took.
    """

    records: list[Any] = field(default_factory=list)
    joint: GraphModule | None = None
    partitioned: tuple[GraphModule, ...] | None = None
    checks: tuple[Callable[[Known], list[Any]], ...] = ()
    bodies: tuple[Any, ...] | None = None
    built: bool = False
    no_values: str = ""
    compared: list[Any] | None = None
    side_effects: tuple[tuple[str, ...], str] = ((), "")
    authoring: Any = None
    ran: Counter[str] | None = None
    profile: tuple[Order, Any, list[dict[str, float]]] | None = None
    _readings: dict[Any, Any] = field(default_factory=dict, repr=False)

    def has_pass_of(self, stage: Stage) -> bool:
        """Whether a pass of that stage has run."""
        return any(record.stage is stage for record in self.records)

    def reading(self, read: Callable[[Known], T]) -> T:
        """`read(self)`, from memory the second time: for what does not change once it is known."""
        if read not in self._readings:
            self._readings[read] = read(self)
        result: T = self._readings[read]
        return result

    def fork(self) -> Known:
        """What another run knows that goes on from here; its records are its own."""
        other = replace(self, _readings=dict(self._readings))
        other.records = [record.fork(other) for record in self.records]
        return other


_READINGS: WeakKeyDictionary[GraphModule, dict[Any, Any]] = WeakKeyDictionary()


def reading(read: Callable[..., T], *graphs: GraphModule) -> T:
    """`read(*graphs)`, from memory the second time: for graphs of a record, which no pass changes any more.

    A graph that somebody edits by hand between two runs of passes is read as it was.
    """
    kept = _READINGS.setdefault(graphs[0], {})
    if (read, graphs[1:]) not in kept:
        kept[read, graphs[1:]] = read(*graphs)
    result: T = kept[read, graphs[1:]]
    return result
