"""Join: forward, backward, gradient clipping and AdamW of one step become one FX graph.

The saved tensors and the gradients are values inside this graph, neither inputs nor outputs. The parameters and the
optimizer's state are inputs that the graph updates in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from workbench.errors import WorkbenchError
from workbench.graph.capture import title
from workbench.graph.facts import facts_of, set_facts
from workbench.graph.partition import ForwardBackward, output_nodes, saved_nodes
from workbench.torch_api import aot
from workbench.torch_api.inductor import lowering

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-2  # of torch.optim.AdamW
STATE = ("exp_avg", "exp_avg_sq")


@dataclass
class StepGraph:
    """The whole step. `graph` takes the forward's inputs, then `exp_avg` and `exp_avg_sq` of each trained parameter,
    then the step count and the learning rate (float32 scalars), and returns the loss and the gradients' norm.

    trained: qualified names of the parameters, in the order of their states. copies: for each, how many ranks hold the
    same shard.
    """

    pair: ForwardBackward
    graph: GraphModule = field(repr=False)
    trained: tuple[str, ...]

    def __repr__(self) -> str:
        return (f"StepGraph({title(self.pair.authored)}: {len(self.graph.graph.nodes)} nodes, {len(self.trained)} "
                "parameters trained)")


def join(pair: ForwardBackward, *, clip: float | None, decompositions: dict[Any, Any] | None = None) -> StepGraph:
    """Join the pair, clipping to the norm `clip` (None: the norm is taken, and nothing is scaled) and AdamW.

    decompositions: the table that the pair's operators were decomposed by, for clipping.
    Raises WorkbenchError where a trained parameter has no gradient, or where the forward writes buffers.
    """
    pair.require_usable()
    if pair.written:
        raise WorkbenchError(f"the whole step of {title(pair.authored)}: the forward writes {pair.written[0]}, which a "
                             "joined graph does not do yet: keep the optimizer outside the graph")
    forward, backward = pair.graphs
    graph, copied = Graph(), dict[Node, Any]()
    _copy(forward, graph, copied)
    taken = [n for n in backward.graph.find_nodes(op="placeholder") if not aot.is_tangent(n)]
    copied |= {node: copied[saved] for node, saved in zip(taken, saved_nodes(forward, backward), strict=True)}
    for node in backward.graph.find_nodes(op="placeholder"):
        if aot.is_tangent(node):
            copied[node] = _ones(graph, node)
    _copy(backward, graph, copied)
    parameters = {aot.parameter_of(n): copied[n] for n in forward.graph.find_nodes(op="placeholder")
                  if aot.is_parameter(n)}
    gradients = _gradients(backward, copied)
    missing = [name for name in parameters if name not in gradients]
    if missing:
        raise WorkbenchError(f"the whole step of {title(pair.authored)}: parameter {missing[0]} gets no gradient: "
                             "freeze it, or use it in the loss")
    names = tuple(gradients)
    inputs = _state(graph, [parameters[name] for name in names])
    norm = _update(pair, graph, names, [parameters[n] for n in names], [gradients[n] for n in names], inputs, clip, decompositions)
    results = output_nodes(forward)[: facts_of(forward).step.results]
    graph.output((copied[results[0]], norm))
    made = aot.like(forward, graph)
    set_facts(made, facts_of(forward).of("graph", pair.facts))
    return StepGraph(pair, made, names)


def _copy(source: GraphModule, graph: Graph, copied: dict[Node, Any]) -> None:
    for node in source.graph.nodes:
        if node.op != "output" and node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)


def _ones(graph: Graph, tangent: Node) -> Node:
    value = tangent.meta["val"]
    ones = graph.call_function(torch.ops.aten.full.default, (list(value.shape), 1.0),
                               {"dtype": value.dtype, "device": value.device, "pin_memory": False})
    ones.meta["val"] = value
    return ones


def _gradients(backward: GraphModule, copied: dict[Node, Any]) -> dict[str, Node]:
    found = {}
    for node, desc in zip(output_nodes(backward), backward.graph.output_node().meta["desc"], strict=True):
        name = aot.gradient_of(desc)
        if name is not None and isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
            found[name] = copied[node]
    return found


def _state(graph: Graph, parameters: Sequence[Node]) -> list[list[Node]]:
    """Placeholders behind the forward's: [exp_avg of each, exp_avg_sq of each, [step, lr]]."""
    last = graph.find_nodes(op="placeholder")[-1]
    mode = lowering.detect_fake_mode([p.meta["val"] for p in parameters])
    with mode:
        scalar = torch.empty((), device=parameters[0].meta["val"].device)
        kinds = [[(f"{kind}_{i}", torch.empty_like(p.meta["val"])) for i, p in enumerate(parameters)]
                 for kind in STATE] + [[("step", scalar), ("lr", scalar if scalar.is_cuda else scalar.double())]]
    made = []
    for kind in kinds:
        made.append([])
        for name, value in kind:
            with graph.inserting_after(last):
                last = graph.placeholder(name)
            last.meta["val"] = value
            made[-1].append(last)
    return made


def _update(pair: ForwardBackward, graph: Graph, names: Sequence[str], parameters: list[Node], gradients: list[Node],
            state: list[list[Node]], clip: float | None, decompositions: dict[Any, Any] | None) -> Node:
    """Append the norm, clipping and AdamW; gives the norm's node."""
    given = [parameters, gradients, *state]
    traced = make_fx(_step_of(_copies(pair, names), clip), decompositions)(*([n.meta["val"] for n in nodes] for nodes in given))
    traced.graph.eliminate_dead_code()
    inside: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"),
                                       [n for nodes in given for n in nodes], strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            inside[node] = graph.node_copy(node, inside.__getitem__)
    (norm,) = output_nodes(traced)
    return inside[norm]


def _copies(pair: ForwardBackward, names: Sequence[str]) -> list[int]:
    """How many ranks hold the same shard of each parameter."""
    from torch.distributed.tensor import DTensor

    held, ranks = dict(pair.authored.module.named_parameters(remove_duplicate=False)), pair.authored.world.size
    found = []
    for name in names:
        shards = 1
        if isinstance(parameter := held[name], DTensor):
            for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
                shards *= 1 if placement.is_replicate() else size
        found.append(ranks // shards)
    return found


def _step_of(copies: Sequence[int], clip: float | None) -> Callable[..., torch.Tensor]:
    """What `pipeline.train` does to gradients and parameters, as one function of lists of tensors."""
    ranks = max(copies, default=1)

    def run(parameters: Any, gradients: Any, exp_avg: Any, exp_avg_sq: Any, scalars: Any) -> torch.Tensor:
        step, lr = scalars
        groups: dict[int, list[torch.Tensor]] = {}
        for same, gradient in zip(copies, gradients, strict=True):
            groups.setdefault(same, []).append(gradient)
        total: Any = sum(torch.nn.utils.get_total_norm(found).double() ** 2 / same for same, found in groups.items())
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            from torch.distributed import _functional_collectives as functional

            total = functional.all_reduce(total, "sum", torch.distributed.group.WORLD)
            total = functional.wait_tensor(total)
        norm = total.sqrt().to(gradients[0].dtype)
        if clip is not None:
            scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
            gradients = [gradient * scale for gradient in gradients]
        step.add_(1)
        torch.ops.aten._fused_adamw_.tensor_lr(
            parameters, gradients, exp_avg, exp_avg_sq, [], [step] * len(parameters), lr=lr, beta1=BETAS[0],
            beta2=BETAS[1], weight_decay=WEIGHT_DECAY, eps=EPS, amsgrad=False, maximize=False)
        return norm

    assert ranks
    return run
