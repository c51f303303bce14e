"""async_tensor_parallel: an all-gather or reduce-scatter and the products beside it become one operator.

The operator multiplies the parts that have arrived while the others are sent, so the products hide the collective:

    >>> example("async_tensor_parallel", lambda x, weight: gather(x) @ weight, ranks=2, axis="tp")
    before:
      ...
      all_gather_into_tensor: float32 [8, 4] = _c10d_functional.all_gather_into_tensor(primals_..., 2, '0')  # layers.0
      wait_tensor: float32 [8, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)  # layers.0
      mm: float32 [8, 4] = aten.mm(wait_tensor, view)  # layers.0
      ...
    after:
      ...
      fused_all_gather_matmul_default: ... = symm_mem.fused_all_gather_matmul(..., [view], 0, '0', ...
      ...

torch's own pass does this, `micro_pipeline_tp_pass`. It takes an all-gather whose products read it as their first
factor, each between two views, and a reduce-scatter of one product that nothing else reads. So it belongs before
`graph_cleanup`, which merges views, and leaves a reduce-scatter of a sum of products as it is.
"""

from workbench.recipe.contracts import Numerics, PassContract, Stage, declare

declare(PassContract(
    "async_tensor_parallel", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "all-gathers and reduce-scatters of the tp axis share operators with their products",
    after=frozenset({"autobucketing_reordering", "transformer_block_bucketing"}),
    source="torch._inductor.fx_passes.micro_pipeline_tp", code="workbench.lab.async_tensor_parallel.transform",
))
