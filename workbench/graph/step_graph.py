"""Join: forward, backward, gradient clipping and AdamW of one step become one FX graph.

The saved tensors and the gradients are values inside this graph, neither inputs nor outputs. The parameters, the
buffers and the optimizer's state are inputs that the graph updates in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from workbench.authoring.author import Authored
from workbench.errors import UnusableGraph, WorkbenchError
from workbench.graph.capture import title
from workbench.graph.facts import Part, StepFacts, facts_of, set_facts
from workbench.graph.partition import ForwardBackward, saved_nodes
from workbench.graph.read.nodes import output_values
from workbench.graph.update import Update, append_update, shards_of
from workbench.torch_api import aot

PAIR = 'set training.step to "pair"'
"""What to do where a step cannot be joined."""


@dataclass
class StepGraph:
    """The whole step. `graph` takes the forward's inputs, then `exp_avg` and `exp_avg_sq` of each trained parameter,
    then the step count and the learning rate, and returns the loss and the gradients' norm.

    trained: qualified names of the parameters, in the order of their states. parameters: their nodes' names.
    gradients: the name of the node of each one's gradient before clipping. body: what runs the graph, once lowered.
    """

    pair: ForwardBackward
    graph: GraphModule = field(repr=False)
    trained: tuple[str, ...]
    parameters: tuple[str, ...] = field(repr=False)
    gradients: dict[str, str] = field(repr=False)
    update: Update
    body: Any = field(default=None, repr=False)
    broken: UnusableGraph | None = field(default=None, repr=False)
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
        other = replace(self)
        other.graph = aot.clone(self.graph)
        facts = facts_of(self.graph)
        set_facts(other.graph, facts.of("step", facts.step.fork()))
        return other

    def __repr__(self) -> str:
        return (f"StepGraph({title(self.pair.authored)}: {len(self.graph.graph.nodes)} nodes, {len(self.trained)} "
                "parameters trained)")


def join(pair: ForwardBackward, update: Update, *, decompositions: dict[Any, Any] | None = None) -> StepGraph:
    """Join the pair, the norm, clipping and AdamW. The pair stays as it is.

    decompositions: the table that the pair's operators were decomposed by, for the operators of clipping.
    Raises WorkbenchError where a trained parameter has no gradient, or the forward returns more than the loss.
    """
    pair.require_usable()
    forward, backward = pair.graphs
    graph, copied, attributes = Graph(), dict[Node, Any](), dict[str, Any]()
    _copy(forward, "forward", graph, copied, attributes)
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if not aot.is_tangent(n)]
    copied |= {node: copied[saved] for node, saved in zip(taken, saved_nodes(forward, backward), strict=True)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if aot.is_tangent(node):
            copied[node] = _ones(graph, node)
    _copy(backward, "backward", graph, copied, attributes)
    inputs = {aot.parameter_of(n): copied[n] for n in forward.graph.find_nodes(op="placeholder")
              if aot.parameter_of(n) is not None and isinstance(n.meta.get("val"), torch.Tensor)}
    gradients = _gradients(backward, copied)
    names = _trained(pair, gradients)
    norm = append_update(graph, update, [inputs[n] for n in names], [gradients[n] for n in names],
                         shards_of(pair.authored, names), decompositions)
    loss = _results(pair, forward, graph, copied, inputs)
    graph.output((loss, norm))
    step = _facts(pair, copied)
    made = aot.like(forward, graph, attributes)
    set_facts(made, facts_of(forward).of("step", step))
    return StepGraph(pair, made, names, tuple(inputs[name].name for name in names),
                     {name: gradients[name].name for name in names}, update)


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


def _copy(source: GraphModule, part: str, graph: Graph, copied: dict[Node, Any], attributes: dict[str, Any]) -> None:
    """Append the nodes of `source` that have no copy yet; its attributes get names of their own."""
    for node in source.graph.nodes:
        if node.op == "output" or node in copied:
            continue
        made = copied[node] = graph.node_copy(node, copied.__getitem__)
        made.meta["custom"] = dict(node.meta.get("custom") or {})
        if node.op == "get_attr":
            made.target = f"{part}_{str(node.target).replace('.', '_')}"
            attributes[made.target] = attrgetter(str(node.target))(source)


def _ones(graph: Graph, tangent: Node) -> Node:
    value = tangent.meta["val"]
    ones = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 1.0),
                               {"dtype": value.dtype, "device": value.device, "pin_memory": False})
    ones.meta["val"] = value
    return ones


def _gradients(backward: GraphModule, copied: dict[Node, Any]) -> dict[str, Node]:
    found = {}
    for node, desc in zip(output_values(backward), backward.graph.output_node().meta["desc"], strict=True):
        name = aot.gradient_of(desc)
        if name is not None and isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
            found[name] = copied[node]
    return found


def _trained(pair: ForwardBackward, gradients: dict[str, Node]) -> tuple[str, ...]:
    """The module's parameters in their order, which is the order in which the eager loop takes the norm."""
    names = tuple(name for name, _ in pair.authored.module.named_parameters())
    missing = [name for name in names if name not in gradients]
    if missing:
        raise WorkbenchError(f"the whole step of {title(pair.authored)}: parameter {missing[0]!r} gets no gradient, "
                             f"and every parameter must: use it in the loss, drop it, or {PAIR}")
    return names


def _results(pair: ForwardBackward, forward: GraphModule, graph: Graph, copied: dict[Node, Any],
             inputs: dict[Any, Node]) -> Node:
    """The loss; what the forward returns as new values of buffers is written into them."""
    count = facts_of(forward).step.results
    descs = forward.graph.output_node().meta["desc"]
    losses = []
    for node, desc in zip(output_values(forward)[:count], descs[:count], strict=True):
        name = aot.written_by(desc)
        if name is None:
            losses.append(node)
            continue
        write = graph.call_function(torch.ops.aten.copy_.default, (inputs[name], copied[node]))
        write.meta["val"] = inputs[name].meta["val"]
    if len(losses) != 1 or losses[0].meta["val"].numel() != 1:
        raise WorkbenchError(f"the whole step of {title(pair.authored)}: the module returns {len(losses)} results, and "
                             f"a whole step takes one loss: return the loss alone, or {PAIR}")
    loss: Node = copied[losses[0]]
    return loss


def _facts(pair: ForwardBackward, copied: dict[Node, Any]) -> StepFacts:
    """The step's facts for the joined graph, whose nodes have other names where both graphs used one."""
    step = replace(pair.facts.fork(), results=2, saved_order=(), recorder=None, replayed_forward=None)
    if step.order is not None:
        names = {f"{part} {node.name}": f"step {copied[node].name}"
                 for part, graph in zip(pair.parts, pair.graphs, strict=True)
                 for node in graph.graph.nodes if isinstance(copied.get(node), Node)}
        step.order = replace(step.order, hidden={names[name]: n for name, n in step.order.hidden.items()})
    return step
