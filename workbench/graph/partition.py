"""Partition: the joint graph becomes a forward and a backward, with what is saved between them."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch.fx import GraphModule, Node

from workbench.authoring.authored import Authored
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.capture import JointGraph, title
from workbench.graph.facts import Known, Part, StepFacts, facts_of, set_facts
from workbench.graph.input_check import InputCheck
from workbench.graph.read.nodes import output_values
from workbench.recipe.contracts import Stage
from workbench.torch_api import aot, partitioning
from workbench.torch_api.garbage import uncollected
from workbench.torch_api.inductor.regions import named_regions
from workbench.torch_api.ops import tensor_bytes

PARTS: tuple[Part, Part] = ("forward", "backward")


@dataclass
class Partitioned:
    """Graphs that passes may replace until `lower` gives them bodies: a forward and a backward, or what a plugin's kind
    of step makes of them.

    The forward returns the step's outputs and then the saved tensors; the backward takes the saved tensors and the
    tangents and returns the gradients. stages: of the passes that run on these graphs.
    """

    slots: tuple[aot.LateBound, ...]
    facts: StepFacts = field(default_factory=StepFacts, init=False, repr=False)
    known: Known = field(default_factory=Known, init=False, repr=False)
    broken: UnusableGraph | None = field(default=None, init=False, repr=False)
    parts: ClassVar[tuple[Part, ...]] = PARTS
    stages: ClassVar[tuple[Stage, ...]] = (Stage.PARTITIONED, Stage.LOWERING, Stage.REPLAY)

    def require_usable(self) -> None:
        """Raise UnusableGraph where a pass left graphs that no later stage can take."""
        if self.broken is not None:
            raise self.broken

    @property
    def forward(self) -> GraphModule:
        return self.slots[0].graph

    @property
    def backward(self) -> GraphModule:
        return self.slots[1].graph

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        return tuple(slot.graph for slot in self.slots)

    @property
    def by_part(self) -> dict[str, GraphModule]:
        return dict(zip(self.parts, self.graphs, strict=True))

    def replace(self, which: Part, graph: GraphModule) -> None:
        slot = self.slots[self.parts.index(which)]
        slot.graph = graph
        values = [n.meta.get("val") for n in graph.graph.find_nodes(op="placeholder")]
        slot.example_inputs = [value if moved(example, value) else example
                               for example, value in zip(slot.example_inputs, values, strict=False)]

    @contextlib.contextmanager
    def context(self, which: Part) -> Iterator[list[Any]]:
        """The tracing state around one of the graphs; gives its example inputs (fake tensors)."""
        slot = self.slots[self.parts.index(which)]
        with slot.context():
            yield slot.example_inputs

    def cut_from(self, joint: GraphModule, known: Known) -> None:
        """Give both graphs the facts of the joint graph that they were cut from, and one StepFacts; go on with what is
        known of the run.
        """
        self.known = known
        known.joint = joint
        known.partitioned = self.graphs
        # the backward may take the saved values in another order
        kept = [n.name for n in saved_nodes(self.forward, self.backward)]
        taken = [n.name for n in self.backward.graph.find_nodes(op="placeholder") if not aot.is_tangent(n)]
        self.facts.results = len(output_values(self.forward)) - len(kept)
        self.facts.saved_order = tuple(map(kept.index, taken))
        # torch's CSE keeps one of equal nodes, whatever their regions: passes compare with what was there before
        self.facts.captured_regions = {
            part: sorted(names) for part, names in named_regions(joint).items()
        }
        for part, graph in zip(PARTS, self.graphs, strict=True):
            set_facts(graph, facts_of(joint).of(part, self.facts))


class Split(Partitioned, ABC):
    """Partitioned graphs that belong to an authored module."""

    @property
    @abstractmethod
    def pair(self) -> ForwardBackward:
        """The forward and backward of the step."""

    def fork(self) -> Self:
        """Another one on the same graphs, for passes to work on; this one stays as it is."""
        other = replace(self, slots=tuple(map(copy.copy, self.slots)))
        other.facts, other.known, other.broken = self.facts.fork(), self.known.fork(), self.broken
        return other

    def __repr__(self) -> str:
        nodes = [f"{part} {len(graph.graph.nodes)} nodes" for part, graph in self.by_part.items()]
        return f"{type(self).__name__}({title(self.pair.authored)}: {', '.join(nodes)})"


@dataclass(repr=False)
class ForwardBackward(Split):
    """The partitioned pair of an authored module; `function` is torch's autograd wrapper around both."""

    authored: Authored
    parameters: list[str]
    buffers: list[str]
    function: Callable[..., Any]
    inputs: InputCheck
    side_effects: tuple[str, ...] = ()
    writes: tuple[str, ...] | None = None

    @property
    def pair(self) -> ForwardBackward:
        return self

    @property
    def written(self) -> list[str]:
        """The parameters and buffers that the captured forward writes, whatever passes have made of it since."""
        if self.writes is not None:
            return list(self.writes)
        metadata = self.slots[0].fw_metadata
        inputs = metadata.input_info if metadata is not None else []
        return [name for name, info in zip([*self.parameters, *self.buffers], inputs, strict=False)
                if info.mutates_data or info.mutates_metadata]

    def fork(self) -> Self:
        """No step can be compiled from the other pair: torch's wrapper calls the bodies of this one."""
        other = super().fork()
        other.function = _no_step
        return other

    def __repr__(self) -> str:
        saved = saved_nodes(self.forward, self.backward)
        size = sum(tensor_bytes(n.meta.get("val")) for n in saved)
        return f"{super().__repr__()[:-1]}, {len(saved)} saved, {size:,} bytes)"


def moved(example: Any, value: Any) -> bool:
    """Whether a pass has put an input on another device."""
    return isinstance(example, torch.Tensor) and isinstance(value, torch.Tensor) and example.device != value.device


def _no_step(*_: Any) -> Any:
    raise WorkbenchError("this pair is for looking at: build its recipe for a step that runs")


def saved_nodes(forward: GraphModule, backward: GraphModule) -> list[Node]:
    """The forward's nodes that the backward receives, in the backward's order; tensors, sizes and meshes alike."""
    order, outputs = saved_order(forward, backward), output_values(forward)
    return [outputs[len(outputs) - len(order) + place] for place in order]


def saved_order(forward: GraphModule, backward: GraphModule) -> list[int]:
    """For each of the backward's inputs before the tangents, its place among what the forward saves.

    torch saves tensors first, and hands sizes that were read from the device to the backward first.
    """
    order = facts_of(forward).step.saved_order
    taken = sum(not aot.is_tangent(n) for n in backward.graph.find_nodes(op="placeholder"))
    return list(range(taken) if order is None else order)


@uncollected()
def partition(joint: JointGraph, by: str = "min_cut") -> ForwardBackward:
    """Split: tags on the nodes say what the backward is given and what it computes again, and `by` what has no tag.

    by "min_cut": the cheapest cut, cheap values are computed again; "default": all that the backward reads is saved.
    Source: torch/_functorch/partitioners.py `min_cut_rematerialization_partition` and `default_partition`. A plugin's
    capture may have a cut of its own, and then `by` says nothing. Closes `joint`. Raises WorkbenchError where it is
    closed already, and for another `by`.
    """
    joint.require_open()
    if joint.cut is not None:
        pair: ForwardBackward = joint.cut(joint)
        return pair
    if by not in partitioning.PARTITIONERS:
        raise WorkbenchError(
            f"partition(..., by={by!r}): by must be one of {', '.join(partitioning.PARTITIONERS)}"
        )
    with joint, joint.contexts.again():
        graph = joint.graph
        # torch edits the graph, and the last pass's record keeps the one it made
        joint.graph = aot.clone(graph)
        try:
            function, forward, backward = partitioning.compile_joint(
                joint.export, by, facts_of(graph).partition_options
            )
        finally:
            joint.graph = graph
    pair = ForwardBackward((forward, backward), joint.authored, joint.parameters, joint.buffers, function, joint.inputs,
                           joint.side_effects)
    pair.cut_from(graph, joint.known)
    return pair
