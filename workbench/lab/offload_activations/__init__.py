"""offload_activations: saved tensors go to pinned host memory, and come back before the backward reads them.

Copies run on streams of their own. A copy is a launch with a wait, as a collective is: compute between the two hides
it.

    >>> example("offload_activations", lambda x, weight: (x @ weight).sigmoid(), layers=2, choose="all", min_bytes=0)
    before:
      ...
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
      return (sum_1, primals_2, sigmoid, detach_2, t_2)
    after:
      ...
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      to_host_default: float32 [4, 4] = workbench.to_host(sigmoid, [4, 1])  # layers.0
      mm_1: float32 [4, 4] = aten.mm(sigmoid, primals_2)  # layers.1
      ...
      wait_copy_default: float32 [4, 4] = workbench.wait_copy(to_host_default, sigmoid)  # layers.0
      ...
      return (sum_1, primals_2, wait_copy_default, wait_copy_default_1, t_2)

The device holds a tensor until its wait. The backward starts each copy as late as compute still hides it, as estimated.

    copies  which tensors, when each copy starts, and where the step waits for it
"""

from typing import Literal

from pydantic import NonNegativeInt

from workbench.recipe.contracts import EstimateOptions, Numerics, PassContract, Stage, declare


class OffloadOptions(EstimateOptions):
    """choose: "hidden" for the tensors whose copies end before the forward does, as estimated, or "all".

    modules: paths of modules, `*` for one component; a saved tensor of another module stays. min_bytes: a smaller one
    stays, too. Times are those of fused pointwise operators, as where a compiler follows.
    """

    choose: Literal["hidden", "all"] = "hidden"
    modules: tuple[str, ...] = ()
    min_bytes: NonNegativeInt = 1 << 20


declare(PassContract(
    "offload_activations", Stage.PARTITIONED, Numerics.EXACT,
    "saved tensors are on the host between forward and backward",
    OffloadOptions, after=frozenset({"async_tensor_parallel", "autobucketing_reordering", "graph_cleanup",
                                     "overlap_collectives", "transformer_block_bucketing"}),
    code="workbench.lab.offload_activations.transform",
))
