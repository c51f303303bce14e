"""Two passes of a joined step that are right alone and wrong together, and linear layers to run them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from workbench.authoring.author import author_module
from workbench.checks.verdicts import Outcome
from workbench.graph.capture import capture
from workbench.graph.partition import partition
from workbench.graph.read.memory import roots
from workbench.graph.read.nodes import is_backward, is_compute, lists_of_update, updates_of
from workbench.lab.whole_step.join import StepGraph, Update, join
from workbench.lab.whole_step.step import WholeStep
from workbench.notebook.draw.picture import Table, table
from workbench.passes.registry import register_pass
from workbench.pipeline.run_passes import PassRecord, run_partitioned
from workbench.pipeline.stages import lower
from workbench.torch_api.aot import parameter_of
from workbench.world.mesh import World

RATE, STEPS = 0.1, 4
_WRONG = "#f6cdb5"


@register_pass("early_updates", stage="step", numerics="exact")
def early_updates(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any) -> GraphModule:
    """Split norm and AdamW into one a weight, each as early as the weight's gradient and its readers allow."""
    _split_norms(gm)
    (update,), owner = updates_of(gm), roots(gm)
    nodes = [node for node in gm.graph.nodes if node is not update]
    *lists, _, steps = lists_of_update(update)
    next(node for node in nodes if node.op == "call_function").prepend(steps[0])  # the step count
    for weight, gradient, *states in zip(*lists, strict=True):
        readers = [node for node in nodes if weight in map(owner.get, node.all_input_nodes)]
        with gm.graph.inserting_after(max([gradient, *readers], key=nodes.index)):
            given = [[each] for each in (weight, gradient, *states)]
            alone = gm.graph.create_node(update.op, update.target, (*given, [], steps[:1]), update.kwargs)
            alone.meta = dict(update.meta)
    gm.graph.erase_node(update)
    return gm


def _split_norms(gm: GraphModule) -> None:
    """Take the norm of each gradient by itself, as soon as it is there: a norm of all of them would keep them all."""
    for norm in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_norm.Scalar):
        gradients, *options = norm.args
        for item in list(norm.users):
            gradient = gradients[item.args[1]]
            with gm.graph.inserting_after(gradient):
                alone = gm.graph.create_node(norm.op, norm.target, ([gradient], *options), norm.kwargs)
            with gm.graph.inserting_after(alone):
                first = gm.graph.create_node(item.op, item.target, (alone, 0))
            alone.meta, first.meta = {**norm.meta, "val": [item.meta["val"]]}, dict(item.meta)
            item.replace_all_uses_with(first)
            gm.graph.erase_node(item)
        gm.graph.erase_node(norm)


@register_pass("sink", stage="step", numerics="exact")
def sink(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any) -> GraphModule:
    """Move each operator down to its first reader, so that no value is made long before it is needed."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and node.users:
            first_reader = min(node.users)  # in the order of the graph
            first_reader.prepend(node)
    return gm


class Layers(nn.ModuleList):
    """Linear layers of width 4 and a squared error."""

    def __init__(self, layers: int = 3) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return ((x - y) ** 2).sum()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both [2, 4]."""
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2, 4, generator=numbers)
    return x, y


@dataclass(frozen=True)
class Trained:
    """A few steps: the weights after them, the loss of each, and where they were one graph, that and its passes."""

    weights: Sequence[torch.Tensor] = field(repr=False)
    losses: Sequence[float]
    joined: StepGraph | None = field(default=None, repr=False)
    records: Sequence[PassRecord] = field(default=(), repr=False)


def eager_loop(layers: int) -> Trained:
    """Train the layers by a plain loop with AdamW."""
    model, losses = Layers(layers), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained([*model.parameters()], losses)


def joined(layers: int, *passes: str, clip: float | None = None) -> tuple[StepGraph, list[PassRecord]]:
    """Join the layers' step and run the passes on it; returns the step's graph, and a record of each pass."""
    world = World("gloo", 1, 0, torch.device("cpu"))
    pair = partition(capture(author_module(Layers(layers), world, None, batch=lambda: batch(0))))
    whole = join(pair, Update(clip=clip))
    return whole, run_partitioned(whole, passes)[0]


def one_graph(layers: int, *passes: str) -> Trained:
    """Train the layers by their joined step, after these passes."""
    whole, records = joined(layers, *passes)
    lower(whole)
    model = whole.pair.authored.module
    step = WholeStep(whole, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True))
    losses = [step(*batch(i))[0].item() for i in range(STEPS)]
    return Trained([*model.parameters()], losses, whole, records)


def same_weights(runs: Mapping[str, Trained], loop: Trained) -> Table:
    """Whether each run left the bits of the loop's weights."""
    rows = [(passes, "PASS" if all(map(torch.equal, run.weights, loop.weights)) else "FAIL")
            for passes, run in runs.items()]
    wrong = {(row, 1): _WRONG for row, (_, outcome) in enumerate(rows) if outcome == "FAIL"}
    return Table(f"after {STEPS} steps", ("passes", "the weights are those of the eager loop, bit for bit"),
                 tuple(rows), fills=wrong)


def first_wrong(loop: Trained, run: Trained) -> tuple[int, Table, str, str]:
    """The first step whose loss is not the eager loop's, counted from 1; a table of both; what they say."""
    rows = [(said, *(f"{loss:.2f}" for loss in each.losses))
            for said, each in (("eager loop", loop), ("both passes", run))]
    shown = table("losses", ("", *(f"step {step}" for step in range(1, STEPS + 1))), rows)
    last = "lower than" if run.losses[-1] < loop.losses[-1] else "close to what"
    return (1 + [a == b for a, b in zip(loop.losses, run.losses, strict=True)].index(False), shown,
            "The first forward reads weights that nobody has touched; only the backward reads updated ones.",
            f"The last loss is {last} it should be. From that column alone, you would ship it.")


def in_order(whole: StepGraph) -> tuple[str, ...]:
    """The matmuls and updates of a joined step of `Layers`, in their order, with the numbers of their weights.

    R reads a weight, G makes its gradient, U updates it; "R1!" comes too late. "|" stands before the backward.
    """
    graph, owner = whole.graph, roots(whole.graph)
    updates = updates_of(graph)
    nodes = {node.name: node for node in graph.graph.nodes}
    written = {update: lists_of_update(update)[0] for update in updates}
    number = {weight: str(parameter_of(weight)).partition(".")[0] for weights in written.values() for weight in weights}
    makes = {owner[nodes[node]]: name.partition(".")[0] for name, node in whole.gradients.items()}
    found, done, forward = list[str](), set[Node](), True
    for node in graph.graph.nodes:
        if node in written:
            found.append("U" + "".join(number[weight] for weight in written[node]))
            done |= {*written[node]}
        elif node.op == "call_function" and is_compute(node):
            if forward and is_backward(node):
                found.append("|")
                forward = False
            read = next((owner[taken] for taken in node.all_input_nodes if owner[taken] in number), None)
            found.append(f"G{makes[node]}" if read is None else f"R{number[read]}" + "!" * (read in done))
    return tuple(found)


def lane(graph: GraphModule) -> str:
    """A letter for each operator of a joined graph: R for a matmul that reads a weight, M for another, U for an update,
    a dot for anything else. A bar stands before the first matmul of the backward.
    """
    updates, owner = updates_of(graph), roots(graph)  # owner: of a view, the input whose memory it shows
    weights = {weight for update in updates for weight in lists_of_update(update)[0]}

    def sign(node: Node) -> str:
        if node in updates:
            return "U"
        if not is_compute(node):
            return "."
        return "R" if weights & {owner[taken] for taken in node.all_input_nodes} else "M"

    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    first = next(node for node in nodes if is_compute(node) and is_backward(node))
    return "".join("|" * (node is first) + sign(node) for node in nodes)


def repairs(answer: Any) -> tuple[float, str]:
    """Grades a repaired `sink`: alone it gives sink's order, and after `early_updates` lint finds nothing."""
    if not callable(answer):
        return 0.0, "give a function such as sink"
    try:
        register_pass("repaired_sink", stage="step", numerics="exact")(answer)
        alone, (both, records) = joined(3, "repaired_sink")[0], joined(3, "early_updates", "repaired_sink")
    except Exception as error:  # the reader's code
        return 0.0, f"{type(error).__name__}: {error}"
    if lane(alone.graph) != lane(joined(3, "sink")[0].graph):
        return 0.0, "without early updates, its order is not sink's"
    lint = records[-1].verdict("lint")
    if lint is None or lint.outcome != Outcome.PASS:
        return 0.0, f"a read comes too late: {lint.message if lint else 'lint did not run'}"
    moved = lane(both.graph) != lane(joined(3, "early_updates")[0].graph)
    return (1.0, "right") if moved else (0.0, "after early updates, it moves nothing")
