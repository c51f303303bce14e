"""Join: forward, backward, gradient clipping and AdamW of one step become one FX graph.

The saved tensors and the gradients are values inside this graph, neither inputs nor outputs. The parameters, the
buffers and the optimizer's state are inputs that the graph updates in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from workbench.authoring.authored import Authored
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.capture import title
from workbench.graph.facts import Known, Part, StepFacts, facts_of, set_facts
from workbench.graph.microbatches import PAIR, Microbatches, Values, refused
from workbench.graph.partition import ForwardBackward, saved_nodes
from workbench.graph.update import Update, append_update, shards_of
from workbench.torch_api import aot


@dataclass
class StepGraph:
    """The whole step. `graph` takes the forward's inputs, then `exp_avg` and `exp_avg_sq` of each trained parameter,
    then the step count and the learning rate, and returns the loss and the gradients' norm.

    trained: qualified names of the parameters, in the order of their states. parameters: their nodes' names.
    gradients: the name of the node of each one's gradient before clipping. terms: of each sum of gradients, the names
    of its terms, one for each microbatch. body: what runs the graph, once lowered. known: what the run has learned.
    """

    pair: ForwardBackward
    graph: GraphModule = field(repr=False)
    trained: tuple[str, ...]
    parameters: tuple[str, ...] = field(repr=False)
    gradients: dict[str, str] = field(repr=False)
    update: Update
    microbatches: int = 1
    terms: tuple[tuple[str, ...], ...] = field(default=(), repr=False)
    body: Any = field(default=None, repr=False)
    broken: UnusableGraph | None = field(default=None, repr=False)
    known: Known = field(default_factory=Known, repr=False)
    parts: tuple[Part, ...] = ("step",)

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        return (self.graph,)

    @property
    def facts(self) -> StepFacts:
        return facts_of(self.graph).step

    def replace(self, which: Part, graph: GraphModule) -> None:
        self.graph = graph

    def require_usable(self) -> None:
        """Raise UnusableGraph where a pass left a graph that no later stage can take."""
        if self.broken is not None:
            raise self.broken

    @contextlib.contextmanager
    def context(self, which: Part = "step") -> Iterator[list[Any]]:
        """The tracing state around the graph; gives its example inputs (fake tensors)."""
        with self.pair.context("forward"):
            yield [node.meta.get("val") for node in self.graph.graph.find_nodes(op="placeholder")]

    def fork(self) -> StepGraph:
        """Another step graph on the same graph, for passes to work on; this one stays as it is."""
        other = replace(self, known=self.known.fork())
        other.graph = aot.clone(self.graph)
        facts = facts_of(self.graph)
        set_facts(other.graph, facts.of("step", facts.step.fork()))
        return other

    def __repr__(self) -> str:
        return (f"StepGraph({title(self.pair.authored)}: {len(self.graph.graph.nodes)} nodes, {len(self.trained)} "
                "parameters trained)")


def join(pair: ForwardBackward, update: Update, *, microbatches: int = 1,
         decompositions: dict[Any, Any] | None = None) -> StepGraph:
    """Join the pair, the norm, clipping and AdamW. The pair stays as it is.

    microbatches: the step's batch has so many times the rows that the pair was captured with, and the update follows
    the mean of the microbatches' losses. decompositions: the table that the pair's operators were decomposed by, for
    the operators of clipping.
    Raises WorkbenchError where a trained parameter has no gradient, the forward returns more than the loss, or the
    gradients of several microbatches cannot be added up before their reduction.
    """
    pair.require_usable()
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise WorkbenchError(f"join(..., microbatches={microbatches!r}): it must be a whole number, 1 or more")
    made = Microbatches(pair, microbatches)
    graph, inputs, gradients = made.graph, made.inputs, made.gradients
    names = _trained(pair, gradients)
    norm = append_update(graph, update, [inputs[n] for n in names], [gradients[n] for n in names],
                         shards_of(pair.authored, names), decompositions)
    graph.output((made.loss(), norm))
    module = aot.like(pair.forward, graph, made.attributes)
    set_facts(module, facts_of(pair.forward).of("step", _facts(pair, made.copies)))
    terms = tuple(tuple(held[node].name for held in made.copies) for node in made.sums)
    known = pair.known.fork()
    known.bodies = None
    joined = StepGraph(pair, module, names, tuple(inputs[name].name for name in names),
                       {name: gradients[name].name for name in names}, update, microbatches, terms, known=known)
    known.joined = replace(joined)  # passes replace the graph of the other
    return joined


def require_joinable(authored: Authored) -> None:
    """Raise WorkbenchError, before anything is captured, for a module whose step cannot be joined."""
    where, names = f"the whole step of {title(authored)}", dict[int, str]()
    for name, parameter in authored.module.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(id(parameter), name)) != name:
            raise WorkbenchError(f"{where}: {first!r} and {name!r} are one parameter (tied weights), which a joined "
                                 f"graph would update twice: untie them, or {PAIR}")
        if not parameter.requires_grad:
            raise WorkbenchError(f"{where}: parameter {name!r} is frozen, and a joined graph updates every parameter: "
                                 f"set requires_grad to True, or {PAIR}")


def _trained(pair: ForwardBackward, gradients: dict[str, Node]) -> tuple[str, ...]:
    """The module's parameters in their order, which is the order in which the eager loop takes the norm."""
    names = tuple(name for name, _ in pair.authored.module.named_parameters())
    missing = [name for name in names if name not in gradients]
    if missing:
        raise refused(pair, f"parameter {missing[0]!r} gets no gradient, and every parameter must: use it in the loss, "
                            "drop it")
    return names


def _facts(pair: ForwardBackward, copies: list[Values]) -> StepFacts:
    """The step's facts for the joined graph, whose nodes have other names where both graphs used one."""
    saved = saved_nodes(*pair.graphs)
    names = frozenset(held[node].name for held in copies for node in saved if node in held)
    step = replace(pair.facts.fork(), results=2, saved_order=(), saved_names=names, recorder=None,
                   replayed_forward=None)
    if step.order is not None:
        hidden = dict[str, int]()
        for part, graph in zip(pair.parts, pair.graphs, strict=True):
            for node in graph.graph.nodes:
                if (found := step.order.hidden.get(f"{part} {node.name}")) is not None:
                    hidden |= {f"step {held[node].name}": found for held in copies if node in held}
        step.order = replace(step.order, hidden=hidden)
    return step
