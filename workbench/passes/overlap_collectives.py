"""overlap_collectives: work that does not need a collective's result moves between its start and its wait.

The second gather starts before the wait for the first, and the first matmul runs before the second wait:

    >>> example("overlap_collectives", lambda x, weight: x @ weight, layers=2, ranks=2)
    before:
      ...
      all_gather_into_tensor: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_1, 2, '0')  # layers.0
      wait_tensor: float32 [4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)  # layers.0
      ...
      mm: float32 [4, 4] = aten.mm(primals_5, view_2)  # layers.0
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      ...
    after:
      ...
      all_gather_into_tensor: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_1, 2, '0')  # layers.0
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      ...
      mm: float32 [4, 4] = aten.mm(primals_5, view_2)  # layers.0
      ...
      wait_tensor_1: float32 [4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)  # layers.1
      ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field
from torch.fx import GraphModule

from workbench.graph.list_schedule import schedule
from workbench.graph.read.collectives import exposed_in_node_order
from workbench.graph.read.cost import device_spec
from workbench.graph.read.nodes import is_compute
from workbench.graph.read.timeline import Costs, costs_of, simulate
from workbench.passes.effect import Effect
from workbench.passes.registry import Graphs, register_pass
from workbench.recipe.contracts import EstimateOptions


class OverlapOptions(EstimateOptions):
    """horizon: how far a node may move, in units of the longest collective's time. fused: pointwise operators cost
    what their fused kernels move, as where a compiler follows; otherwise each operator is a kernel.
    """

    horizon: float = Field(40.0, gt=0)
    fused: bool = True


def less_exposed(before: Graphs, after: Graphs, options: OverlapOptions) -> Effect:
    """Compute waits for collectives for less time than before, as estimated over forward and backward."""
    was, now = (_exposed_ms(graphs, options) for graphs in (before, after))
    bare = [
        sum(len(exposed_in_node_order(graph)) for graph in graphs) for graphs in (before, after)
    ]
    spec = device_spec(options.device)
    evidence = {
        "exposed_ms": [round(was, 4), round(now, 4)],
        "estimated_for": f"{spec.name}, {spec.trust}",
        "with_nothing_between": bare,
    }
    if not was:
        return Effect(False, "no collective is exposed, as estimated", evidence)
    if now < 0.999 * was:
        return Effect(True, "", evidence)
    return Effect(False, "no work is free to move behind what is exposed", evidence)


def _exposed_ms(graphs: Graphs, options: OverlapOptions) -> float:
    return sum(simulate(gm.graph.nodes, order_costs(options, gm)).exposed_ms for gm in graphs)


def order_costs(options: OverlapOptions, gm: GraphModule) -> Costs:
    """The costs by which `overlap_collectives` orders the graph."""
    return costs_of(gm, options.device, fused=options.fused)


@register_pass(
    "overlap_collectives", stage="partitioned", numerics="exact",
    changes="the same nodes in another order, in which less of the collectives is exposed",
    options=OverlapOptions,
    after={"async_tensor_parallel", "autobucketing_reordering", "transformer_block_bucketing"},
    effect=less_exposed, order_costs=order_costs, source="workbench",
)
def overlap_collectives(gm: GraphModule, example_inputs: list[Any], *, options: OverlapOptions) -> GraphModule:
    """Reorder the graph by estimates that are the same on every rank. No node is added, changed or removed.

    Of four orders, two hide behind all compute and two behind matmuls and attentions alone, with the whole horizon and
    with a quarter of it; the least exposed is taken.
    """
    costs = order_costs(options, gm)
    products = replace(
        costs, compute={node: ms * is_compute(node) for node, ms in costs.compute.items()}
    )
    least, best = simulate(gm.graph.nodes, costs).exposed_ms, None
    for hide_behind in (costs, products):
        for horizon in (options.horizon, max(1, options.horizon // 4)):
            order = schedule(gm, hide_behind, horizon, fused=options.fused)
            exposed_ms = simulate(order, costs).exposed_ms
            if exposed_ms < least:
                least, best = exposed_ms, order
    for node in best or ():
        if node.op not in ("placeholder", "output"):
            gm.graph.output_node().prepend(node)
    return gm
