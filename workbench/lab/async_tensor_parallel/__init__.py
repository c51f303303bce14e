"""async_tensor_parallel: an all-gather or reduce-scatter and the products beside it become one operator.

The operator multiplies the parts that have arrived while the others are sent, so the products hide the collective:

    >>> example("async_tensor_parallel", lambda x, weight: gather(x) @ weight, ranks=2, axis="tp", choose="all")
    before:
      ...
      all_gather_into_tensor: float32 [8, 4] = _c10d_functional.all_gather_into_tensor(primals_..., 2, '0')  # layers.0
      wait_tensor: float32 [8, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor)  # layers.0
      mm: float32 [8, 4] = aten.mm(wait_tensor, view)  # layers.0
      ...
    after:
      ...
      fused_all_gather_matmul_default: ... = symm_mem.fused_all_gather_matmul(primals_..., [view], 0, '0', ...
      getitem: float32 [8, 4] = operator.getitem(fused_all_gather_matmul_default, 1)  # layers.0
      getitem_1: float32 [8, 4] = operator.getitem(getitem, 0)  # layers.0
      ...

A reduce-scatter of a sum of products, such as the gradient of the input of wq, wk and wv, needs one product first:
a1 @ b1 + a2 @ b2 = [a1 a2] @ [b1; b2]. The concatenated factors cost traffic, and the sum's own traffic disappears.
"""

from typing import Literal

from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage, declare


class AsyncTensorParallelOptions(EstimateOptions):
    """choose: "paying" for the collectives that hide more time than the operator costs, as estimated, or "all"."""

    choose: Literal["paying", "all"] = "paying"


declare(PassContract(
    "async_tensor_parallel", Stage.PARTITIONED, Numerics.REDUCTION_ORDER,
    "each all-gather or reduce-scatter of the tp axis shares an operator with its products",
    AsyncTensorParallelOptions, after=frozenset({"autobucketing_reordering", "transformer_block_bucketing"}),
    source="torch.ops.symm_mem.fused_all_gather_matmul, fused_matmul_reduce_scatter",
    code="workbench.lab.async_tensor_parallel.transform",
))
