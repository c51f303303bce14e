"""transformer_block_bucketing: many small collectives become few large ones, one bucket for each named module.

    >>> example("transformer_block_bucketing", lambda x, weight: x @ weight, layers=2, ranks=2,
    ...         buckets=[["layers.0", "layers.1"]])
    before:
      ...
      all_gather_into_tensor: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_1, 2, '0')  # layers.0
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      ...
    after:
      ...
      _pre_bucket_all_gather: float32 [32] = bucketing._pre_bucket_all_gather([view_1, view_4], 2, ...)  # layers.0
      slice_1: float32 [16] = aten.slice.Tensor(_pre_bucket_all_gather, 0, 0, 16)  # layers.0
      all_gather_into_tensor_out: float32 [32] = _c10d_functional.all_gather_into_tensor_out(slice_1, 2, ...
      wait_tensor_2: float32 [32] = _c10d_functional.wait_tensor(all_gather_into_tensor_out)  # layers.0
      view_6: float32 [2, 16] = aten.view(wait_tensor_2, [2, -1])  # layers.0
      split_with_sizes: float32 [2, 8], float32 [2, 8] = aten.split_with_sizes(view_6, [8, 8], 1)  # layers.0
      ...
"""

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class BlockBucketingOptions(Options):
    """buckets: module paths, or lists of them, by default the model's blocks. separate_gather_group: all-gathers get a
    process group of their own, so that they can overlap with reduce-scatters.
    """

    buckets: tuple[str | tuple[str, ...], ...] = ()
    separate_gather_group: bool = True


CONTRACT = PassContract(
    "transformer_block_bucketing", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "one all-gather and one reduce-scatter a bucket, the same bytes",
    BlockBucketingOptions, conflicts=frozenset({"autobucketing_reordering"}), needs=frozenset({"fsdp"}),
    source="torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing",
)
__getattr__ = loads_on_use(__name__)
