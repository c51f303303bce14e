"""Two passes of a joined step that are right alone and wrong together, and three linear layers to run them on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from workbench.lab.whole_step.join import Update, join
from workbench.lab.whole_step.step import WholeStep
from workbench.notebook.draw.picture import Table, table
from workbench.passes.registry import register_pass
from workbench.pipeline.run_passes import PassRecord, run_partitioned
from workbench.pipeline.stages import lower
from workbench.world.mesh import World

RATE = 0.1


@register_pass("early_updates", stage="step", numerics="exact")
def early_updates(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any) -> GraphModule:
    """Split the one AdamW into one a weight, each as early as the weight's gradient and its readers allow."""
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


@register_pass("sink", stage="step", numerics="exact")
def sink(gm: GraphModule, example_inputs: Sequence[Any], *, options: Any) -> GraphModule:
    """Move each operator down to its first reader, so that no value is made long before it is needed."""
    for node in reversed(list(gm.graph.nodes)):
        if node.op == "call_function" and node.users:
            first_reader = min(node.users)  # in the order of the graph
            first_reader.prepend(node)
    return gm


class Layers(nn.ModuleList):
    """Three linear layers of width 4 and a squared error."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return ((x - y) ** 2).sum()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both [2, 4]."""
    numbers = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2, 4, generator=numbers)
    return x, y


def three_layers(*passes: str, clip: float | None = None) -> tuple[WholeStep, list[PassRecord]]:
    """Join the three layers' step and run the passes on it; returns the step, and a record of each pass."""
    world, model = World("gloo", 1, 0, torch.device("cpu")), Layers()
    pair = partition(capture(author_module(model, world, None, batch=lambda: batch(0))))
    joined = join(pair, Update(clip=clip))
    records = run_partitioned(joined, passes)[0]
    lower(joined)
    return WholeStep(joined, torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)), records


def eager_loop(model: nn.Module, batches: Iterable[tuple[torch.Tensor, ...]], *, clip: float = math.inf) -> list[float]:
    """Train `model` by a plain loop with clipping and AdamW; returns the loss of each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True), list[float]()
    for given in batches:
        optimizer.zero_grad()
        loss = model(*given)
        loss.backward()
        if clip < math.inf:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def first_wrong(right: Sequence[float], found: Sequence[float]) -> tuple[int, Table, str, str]:
    """The first step whose loss is not the eager loop's, counted from 1; a table of both; what they say."""
    rows = [(said, *(f"{loss:.2f}" for loss in losses))
            for said, losses in (("eager loop", right), ("both passes", found))]
    shown = table("losses", ("", *(f"step {step}" for step in range(1, len(right) + 1))), rows)
    return (1 + [a == b for a, b in zip(right, found, strict=True)].index(False), shown,
            "The first forward reads weights that nobody has touched; only the backward reads updated ones.",
            "The fourth loss is even lower than it should be. From that column alone, you would ship it.")


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
        alone, (both, records) = three_layers("repaired_sink")[0], three_layers("early_updates", "repaired_sink")
    except Exception as error:  # the reader's code
        return 0.0, f"{type(error).__name__}: {error}"
    if lane(alone.joined.graph) != lane(three_layers("sink")[0].joined.graph):
        return 0.0, "without early updates, its order is not sink's"
    lint = records[-1].verdict("lint")
    if lint is None or lint.outcome != Outcome.PASS:
        return 0.0, f"a read comes too late: {lint.message if lint else 'lint did not run'}"
    moved = lane(both.joined.graph) != lane(three_layers("early_updates")[0].joined.graph)
    return (1.0, "right") if moved else (0.0, "after early updates, it moves nothing")
