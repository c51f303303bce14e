"""autobucketing_reordering: many small collectives become few large ones, chosen and placed by estimated cost.

The scheduler merges the last two reduce-scatters and moves the waits to the end. It leaves the first one alone, whose
time the matmuls hide:

    >>> example("autobucketing_reordering", lambda x, weight: x @ weight, graph="backward", layers=3, ranks=2)
    before:
      ...
      reduce_scatter_tensor: float32 [2, 4] = _c10d_functional.reduce_scatter_tensor(view_9, 'avg', 2, '0')  # layers.2
      wait_tensor_3: float32 [2, 4] = _c10d_functional.wait_tensor(reduce_scatter_tensor)  # layers.2
      ...
      reduce_scatter_tensor_1: float32 [2, 4] = ...
      reduce_scatter_tensor_2: float32 [2, 4] = ...
    after:
      ...
      reduce_scatter_tensor: float32 [2, 4] = _c10d_functional.reduce_scatter_tensor(view_9, 'avg', 2, '0')  # layers.2
      ...
      cat: float32 [2, 16] = aten.cat([view, view_1], 1)  # layers.1
      view_2: float32 [32] = aten.view(cat, [32])  # layers.1
      reduce_scatter_tensor_3: float32 [16] = _c10d_functional.reduce_scatter_tensor(view_2, 'avg', 2, '0')  # layers.1
      wait_tensor_3: float32 [2, 4] = _c10d_functional.wait_tensor(reduce_scatter_tensor)  # layers.2
      ...
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

from workbench.graph.read.timeline import Costs, costs_of, scheduler_ms
from workbench.passes.merged_collectives import launches_saved
from workbench.passes.registry import register_pass
from workbench.recipe.contracts import EstimateOptions
from workbench.torch_api.inductor import bucketing
from workbench.torch_api.inductor.bucketing import scheduler_times


def order_costs(options: EstimateOptions, gm: GraphModule) -> Costs:
    """The costs that the order is judged by: torch's scheduler hides behind matmuls, and not behind pointwise work."""
    return costs_of(gm, options.device, fused=True)


@register_pass(
    "autobucketing_reordering",
    stage="partitioned",
    numerics="reduction_order",
    changes="fewer all-gather and reduce-scatter launches, the same bytes",
    options=EstimateOptions,
    conflicts={"transformer_block_bucketing"},
    needs={"fsdp"},
    effect=launches_saved,
    order_costs=order_costs,
    source="torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing",
)
def autobucketing_reordering(
    gm: GraphModule, example_inputs: list[Any], *, options: EstimateOptions
) -> GraphModule:
    """Bucket and reorder by cost. Estimates follow from shapes, so that every rank schedules alike."""
    with scheduler_times(scheduler_ms(gm, options.device)) as ms:
        return bucketing.bucket_by_cost(gm, ms)
