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

from pydantic import Field

from workbench.passes import loads_on_use
from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage


class OverlapOptions(EstimateOptions):
    """horizon: how far a node may move, in units of the longest collective's time. fused: pointwise operators cost
    what their fused kernels move, as where a compiler follows; otherwise each operator is a kernel.
    """

    horizon: float = Field(40.0, gt=0)
    fused: bool = True


CONTRACT = PassContract(
    "overlap_collectives", Stage.PARTITIONED, Numerics.EXACT,
    "the same nodes in another order, in which less of the collectives is exposed",
    OverlapOptions, after=frozenset({"autobucketing_reordering", "transformer_block_bucketing"}),
)
__getattr__ = loads_on_use(__name__)
