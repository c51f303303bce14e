"""What torch's own partitioner would save of a joint graph, alone or under its own memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from workbench.graph.facts import facts_of, set_facts
from workbench.graph.read.memory import saved_tensors
from workbench.graph.read.nodes import is_backward
from workbench.graph.saving.values import Producer
from workbench.torch_api import aot, partitioning
from workbench.torch_api.garbage import uncollected


@dataclass(frozen=True)
class Cut:
    """saved: owner of each saved tensor's memory, with its bytes; the graph's inputs are left out. ms: of what the
    backward computes again, beside what another pass has decided. share: the budget that torch was given; None for a
    traced graph, which has no partitioner.
    """

    share: float | None
    saved: Mapping[str, int] = field(repr=False)
    ms: float

    @property
    def bytes(self) -> int:
        return sum(self.saved.values())


@uncollected()
def torch_cut(gm: GraphModule, producers: Sequence[Producer], share: float = 1.0) -> Cut:
    """The minimum cut of the graph as it is; a traced graph saves all that its backward reads and no tag excludes.

    producers: those of `gm`. share: torch's `activation_memory_budget`.
    """
    if not facts_of(gm).partitioner:
        kept = {e.node.name: e.bytes for made in producers if not made.decided for e in made.results if e.read}
        return Cut(None, kept, 0.0)
    graph = aot.clone(gm)
    descs = graph.graph.output_node().meta["desc"]  # of the forward's results, and then of the gradients
    results = next((i for i, desc in enumerate(descs) if aot.gradient_of(desc) is not None), len(descs))
    forward, backward = partitioning.cut(graph, results, share)
    set_facts(backward, facts_of(gm).of("backward"))
    again = repeated(forward, backward)
    prices = {made.node.name: made.ms for made in producers if not made.decided}
    rows = {row.alias[-1] if row.held_bytes else "": row.held_bytes for row in saved_tensors(forward, backward)}
    rows.pop("", None)
    return Cut(share, rows, sum(prices.get(name, 0.0) for name in again))


def repeated(forward: GraphModule, backward: GraphModule) -> list[str]:
    """The forward operators that the backward holds too: the partitioner keeps their names."""
    names = {n.name for n in forward.graph.find_nodes(op="placeholder")}
    names |= {n.name for n in forward.graph.nodes if n.op == "call_function"}
    return [n.name for n in backward.graph.nodes if n.op == "call_function" and n.name in names and not is_backward(n)]


def repeatable(node: Node) -> bool:
    """Whether the partitioner may compute the operator again in the backward: torch has a list of them."""
    return partitioning.repeatable(node)
