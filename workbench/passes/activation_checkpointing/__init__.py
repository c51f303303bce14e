"""activation_checkpointing: which forward values are saved for the backward, and which it computes again.

The pass tags nodes of the joint graph, and the partitioner reads the tags. Here the backward computes `mm` and
`sigmoid` again, and gets the forward's inputs instead of their results:

    >>> example("activation_checkpointing", lambda x, weight: (x @ weight).sigmoid(), graph="backward", policy="full")
    before:
      detach_1: float32 [4, 4]  # input
      t: float32 [4, 4]  # input
      ...
      sigmoid_backward: float32 [4, 4] = aten.sigmoid_backward(expand, detach_1)  # layers.0
      ...
    after:
      primals_1: float32 [4, 4]  # layers.0.weight
      primals_2: float32 [4, 4]  # input
      ...
      mm: float32 [4, 4] = aten.mm(primals_2, primals_1)  # layers.0
      sigmoid: float32 [4, 4] = aten.sigmoid(mm)  # layers.0
      ...
"""

from typing import Literal

from pydantic import PositiveInt

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class CheckpointOptions(Options):
    """policy none: no tags. full: everything in a layer is recomputed. selective: attention, reduce-scatters, the
    operators named in `save` and every `every_nth_matmul`-th matrix product are saved, the rest is recomputed.
    """

    policy: Literal["none", "selective", "full"] = "selective"
    save: tuple[str, ...] = ()
    every_nth_matmul: PositiveInt = 2


CONTRACT = PassContract(
    "activation_checkpointing", Stage.JOINT, Numerics.EXACT,
    "tagged activations are recomputed in the backward and not saved",
    CheckpointOptions, after=frozenset({"inductor_decomposition"}),
    source="torch.utils.checkpoint.CheckpointPolicy, read by min_cut_rematerialization_partition",
)
__getattr__ = loads_on_use(__name__)
