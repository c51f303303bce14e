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

from pydantic import Field, PositiveInt

from workbench.passes import loads_on_use
from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage


class AutobucketingOptions(EstimateOptions):
    """Limits of the scheduler; bucket_cap_mb also makes buckets of this size before it schedules."""

    max_in_flight_gb: float = Field(5.0, gt=0)
    max_compute_pre_fetch: PositiveInt = 200
    bucket_cap_mb: float | None = Field(None, gt=0)


CONTRACT = PassContract(
    "autobucketing_reordering", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "fewer all-gather and reduce-scatter launches, the same bytes",
    AutobucketingOptions, conflicts=frozenset({"transformer_block_bucketing"}), needs=frozenset({"fsdp"}),
    source="torch._inductor.fx_passes.overlap_scheduling.schedule_overlap_bucketing",
)
__getattr__ = loads_on_use(__name__)
