"""reshard_after_forward: keep gathered parameters for the backward, or gather them again there.

The pass tags nodes of the joint graph, and the partitioner reads the tags. Before, the backward gets the gathered
weight `t_1`, of all 4 rows; after, it gets this rank's 2 rows and gathers the rest:

    >>> example("reshard_after_forward", lambda x, weight: x @ weight, graph="backward", layers=2, ranks=2)
    before:
      ...
      t_1: float32 [4, 4]  # input
      ...
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      ...
    after:
      ...
      primals_3: float32 [2, 4]  # layers.1.weight
      ...
      all_gather_into_tensor_1: float32 [4, 4] = _c10d_functional.all_gather_into_tensor(view_4, 2, '0')  # layers.1
      wait_tensor_1: float32 [4, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_1)  # layers.1
      view_5: float32 [4, 4] = aten.view(wait_tensor_1, [4, 4])  # layers.1
      t_1: float32 [4, 4] = aten.t(view_5)  # layers.1
      mm_3: float32 [4, 4] = aten.mm(expand, t_1)  # layers.1
      ...
"""

from typing import Literal

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class ReshardOptions(Options):
    """always: the backward gathers the parameters again. never: the forward saves them for it."""

    policy: Literal["always", "never"] = "always"


CONTRACT = PassContract(
    "reshard_after_forward", Stage.JOINT, Numerics.EXACT,
    "always: no saved tensor aliases a gathered parameter; never: no gather is repeated",
    ReshardOptions, needs=frozenset({"fsdp"}),
    after=frozenset({"inductor_decomposition", "activation_checkpointing"}),
    source="arXiv:2411.00284 (SimpleFSDP)",
)
__getattr__ = loads_on_use(__name__)
