"""Join: forward, backward, gradient clipping and AdamW of one step become one FX graph.

The saved tensors and the gradients are values inside this graph, neither inputs nor outputs. The parameters, the
buffers and the optimizer's state are inputs that the graph updates in place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.authoring.authored import Authored
from workbench.checks.verdicts import Verdict
from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.facts import Known, Part, StepFacts, facts_of, set_facts
from workbench.graph.pair_function import laid_out_as
from workbench.graph.partition import ForwardBackward, Split, saved_nodes
from workbench.graph.read.nodes import output_values
from workbench.lab.whole_step import checks
from workbench.pipeline.train import clipping, copies_of, squares
from workbench.recipe.contracts import Stage
from workbench.torch_api import aot
from workbench.torch_api.distributed.adamw import FUSED, STATE, scalar_dtype
from workbench.torch_api.inductor import lowering

PAIR = 'set training.step to "pair", or leave out optimizer= of workbench.compile'


@dataclass(frozen=True)
class Update:
    """AdamW's numbers. clip: the largest norm, or None. skip: a step whose norm is not finite changes nothing."""

    clip: float | None = 1.0
    skip: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled_weight_decay: ClassVar[bool] = True  # Adam has the same options, and adds the decay to the gradient


@dataclass(repr=False, eq=False)
class StepGraph(Split):
    """The whole step. `graph` takes the forward's inputs, then `exp_avg` and `exp_avg_sq` of each trained parameter,
    then the step count and the learning rate, and returns the loss and the gradients' norm.

    of: the pair that was joined. trained: qualified names of the parameters, in the order of their states. gradients:
    the name of the node of each one's gradient before clipping.
    """

    of: ForwardBackward
    trained: tuple[str, ...]
    gradients: dict[str, str]
    update: Update
    parts: ClassVar[tuple[Part, ...]] = ("step",)
    stages: ClassVar[tuple[Stage, ...]] = (Stage.STEP, Stage.LOWERING, Stage.REPLAY)

    @property
    def pair(self) -> ForwardBackward:
        return self.of

    @property
    def graph(self) -> GraphModule:
        return self.slots[0].graph

    def check(self, known: Known) -> list[Verdict]:
        """Lint, collectives and, where a pass chose one, the order of the graph as it was joined."""
        return known.reading(self.verdicts)

    def verdicts(self, _: Known | None = None) -> list[Verdict]:
        return checks.of_joined(self)


def join(pair: ForwardBackward, update: Update, *, decompositions: dict[Any, Any] | None = None) -> StepGraph:
    """Join the pair, the norm, clipping and AdamW. The pair stays as it is.

    decompositions: the table that the pair's operators were decomposed by, for the operators of clipping.
    Raises WorkbenchError where a trained parameter has no gradient, or the forward returns more than the loss.
    """
    pair.require_usable()
    graph, copies, attributes = Graph(), dict[Node, Node](), dict[str, Any]()
    _append(graph, "forward", pair.forward, copies, attributes)
    saved = iter(saved_nodes(pair.forward, pair.backward))
    for node in pair.backward.graph.find_nodes(op="placeholder"):
        copies[node] = _unit_gradient(graph, node) if aot.is_tangent(node) else copies[next(saved)]
    _append(graph, "backward", pair.backward, copies, attributes)
    inputs = {aot.parameter_of(node): copies[node] for node in pair.forward.graph.find_nodes(op="placeholder")
              if _is_tensor(node)}
    gradients = _gradients(pair, copies)
    parameters = {name: inputs[name] for name in gradients}
    norm = _append_update(graph, update, pair.authored, parameters, gradients, decompositions)
    graph.output((_append_results(graph, pair, copies, inputs), norm))
    slot = copy.copy(pair.slots[0])
    slot.graph, slot.body = aot.like(pair.forward, graph, attributes), None
    slot.example_inputs = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    names = {name: node.name for name, node in gradients.items()}
    joined = StepGraph((slot,), pair, tuple(names), names, update)
    joined.facts = _facts(pair, copies)
    set_facts(joined.graph, facts_of(pair.forward).of("step", joined.facts))
    joined.known = pair.known.fork()
    joined.known.bodies = None
    joined.known.checks += (joined.fork().check,)  # passes replace the graph of the other
    return joined


def _append(graph: Graph, part: str, source: GraphModule, copies: dict[Node, Node], attributes: dict[str, Any]) -> None:
    """Append the nodes of `source` that have no copy yet."""
    graph.graph_copy(source.graph, copies)
    for node in source.graph.find_nodes(op="get_attr"):
        name = copies[node].target = f"{part}_{str(node.target).replace('.', '_')}"
        attributes[name] = attrgetter(str(node.target))(source)


def _unit_gradient(graph: Graph, tangent: Node) -> Node:
    """The gradient of the loss by itself."""
    value = tangent.meta["val"]
    gradient = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 1.0), {
        "dtype": value.dtype, "device": value.device, "pin_memory": False})
    gradient.meta["val"] = value
    return gradient


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _outputs(graph: GraphModule) -> list[tuple[Any, Any]]:
    """(node, descriptor) of each output that has one."""
    return list(zip(output_values(graph), graph.graph.output_node().meta["desc"], strict=False))


def _append_results(graph: Graph, pair: ForwardBackward, copies: dict[Node, Node],
                    inputs: dict[str | None, Node]) -> Node:
    """What the forward returns as a new value of a buffer is written into it; returns the loss."""
    losses: list[Node] = []
    for node, desc in _outputs(pair.forward)[:pair.facts.results]:
        name = aot.written_by(desc)
        if name is None:
            losses.append(node)
        elif name in inputs:
            write = graph.call_function(torch.ops.aten.copy_.default, (inputs[name], copies[node]))
            write.meta["val"] = inputs[name].meta["val"]
    if len(losses) != 1 or losses[0].meta["val"].numel() != 1:
        raise _refused(pair.authored, f"the module returns {len(losses)} results, and a whole step takes one loss: "
                                      "return the loss alone")
    return copies[losses[0]]


def _gradients(pair: ForwardBackward, copies: dict[Node, Node]) -> dict[str, Node]:
    """The gradient of each parameter, or its local part, in the order in which the eager loop takes the norm."""
    nodes = {aot.gradient_of(desc): copies[node] for node, desc in _outputs(pair.backward) if _is_tensor(node)}
    names = [name for name, _ in pair.authored.module.named_parameters()]
    if without := [name for name in names if name not in nodes]:
        raise _refused(pair.authored, f"parameter {without[0]!r} gets no gradient, and every parameter must: use it in "
                                      "the loss, drop it")
    return {name: nodes[name] for name in names}


def _refused(authored: Authored, why: str) -> WorkbenchError:
    return WorkbenchError(f"the whole step of {title(authored)}: {why}, or {PAIR}")


def require_joinable(authored: Authored) -> None:
    """Raise WorkbenchError, before anything is captured, for a module whose step cannot be joined."""
    names = dict[int, str]()
    for name, parameter in authored.module.named_parameters(remove_duplicate=False):
        if (first := names.setdefault(id(parameter), name)) != name:
            raise _refused(authored, f"{first!r} and {name!r} are one parameter (tied weights), which a joined graph "
                                     "would update twice: untie them")
        if not parameter.requires_grad:
            raise _refused(authored, f"parameter {name!r} is frozen, and a joined graph updates every parameter: set "
                                     "requires_grad to True")


def _facts(pair: ForwardBackward, copies: dict[Node, Node]) -> StepFacts:
    """The step's facts for the joined graph, whose nodes have other names where both graphs used one."""
    saved = saved_nodes(pair.forward, pair.backward)
    step = replace(pair.facts.fork(), results=2, saved_order=(), recorder=None, replayed_forward=None,
                   saved_names=frozenset(copies[node].name for node in saved))
    if step.order is not None:
        names = {f"{part} {node.name}": f"step {copies[node].name}" for part, graph in pair.by_part.items()
                 for node in graph.graph.nodes if node in copies}
        step.order = copy.copy(step.order)
        step.order.hidden = {names[key]: count for key, count in step.order.hidden.items()}
    return step


def _append_update(graph: Graph, update: Update, authored: Authored, parameters: dict[str, Node],
                  gradients: dict[str, Node], decompositions: dict[Any, Any] | None) -> Node:
    """Append the state's placeholders, the norm, clipping and AdamW; returns the norm's node."""
    tensors, ranks = dict(authored.module.named_parameters()), authored.world.size
    shared = [copies_of(tensors[name], ranks) for name in parameters]
    inputs = [[*parameters.values()], [*gradients.values()], *_placeholders(graph, [*parameters.values()])]
    traced = make_fx(_step(update, shared), decompositions)(*([n.meta["val"] for n in nodes] for nodes in inputs))
    traced.graph.eliminate_dead_code()
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), [n for nodes in inputs for n in nodes], strict=True))
    graph.graph_copy(traced.graph, copies)
    return copies[traced.graph.output_node().all_input_nodes[0]]


def _placeholders(graph: Graph, parameters: Sequence[Node]) -> list[list[Node]]:
    """Placeholders behind the forward's: [exp_avg of each, exp_avg_sq of each, [step, lr]]."""
    shards = [p.meta["val"] for p in parameters]
    device = shards[0].device
    with lowering.detect_fake_mode(shards):
        values = {f"{kind}_{i}": torch.empty_like(shard) for kind in STATE for i, shard in enumerate(shards)}
        values |= {name: torch.empty((), dtype=scalar_dtype(name, device), device=device) for name in ("step", "lr")}
    nodes = [graph.find_nodes(op="placeholder")[-1]]
    for name, value in values.items():
        with graph.inserting_after(nodes[-1]):
            nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = value
    return [nodes[1:len(shards) + 1], nodes[len(shards) + 1:-2], nodes[-2:]]


def _step(update: Update, copies: Sequence[int]) -> Any:
    """What `pipeline.train` does to gradients and parameters, as one function of lists of tensors."""

    def run(parameters: Any, gradients: Any, exp_avg: Any, exp_avg_sq: Any, scalars: Any) -> torch.Tensor:
        step, lr = scalars
        gradients = [laid_out_as(p, g) for p, g in zip(parameters, gradients, strict=True)]
        total = squares(gradients, copies)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            everyone = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
            total = torch.ops._c10d_functional.all_reduce(total, "sum", everyone)
            total = torch.ops._c10d_functional.wait_tensor(total)
        norm = total.sqrt().to(gradients[0].dtype)
        if update.clip is not None:
            scale = clipping(norm, update.clip)
            gradients = [gradient * scale for gradient in gradients]
        infinite = torch.logical_not(torch.isfinite(norm)).to(torch.float32) if update.skip else None
        step.add_(1 if infinite is None else 1 - infinite)
        FUSED(parameters, gradients, exp_avg, exp_avg_sq, [], [step] * len(parameters), lr=lr, beta1=update.betas[0],
              beta2=update.betas[1], weight_decay=update.weight_decay, eps=update.eps, amsgrad=False, maximize=False,
              found_inf=infinite)
        return norm

    return run
