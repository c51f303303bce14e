"""overlap_update: each group of parameters is updated as soon as its gradients are there and its last read is done.

    >>> example("overlap_update", lambda x, weight: (x @ weight).relu(), layers=2, graph="step", clip=None, groups=2)
    before:
      ...
      add_: float32 [] = aten.add_.Tensor(step, 1)
      _fused_adamw_: not recorded = aten._fused_adamw_.tensor_lr([primals_1, primals_2], [mm_4, mm_2], ...
      return (sum_1, _to_copy_1)
    after:
      ...
      mm_3: float32 [4, 4] = aten.mm(threshold_backward, t_1)  # layers.1
      add_: float32 [] = aten.add_.Tensor(step, 1)
      _fused_adamw__tensor_lr: not recorded = aten._fused_adamw_.tensor_lr([primals_2], [mm_2], ...
      ...
      mm_4: float32 [4, 4] = aten.mm(t_2, threshold_backward_1)  # layers.0
      _fused_adamw__tensor_lr_1: not recorded = aten._fused_adamw_.tensor_lr([primals_1], [mm_4], ...
      ...
"""

from pydantic import PositiveInt

from workbench.passes import loads_on_use
from workbench.recipe.contracts import Numerics, Options, PassContract, Stage


class UpdateOptions(Options):
    """groups: the most updates that the one is cut into, of about as many bytes each."""

    groups: PositiveInt = 8


CONTRACT = PassContract("overlap_update", Stage.STEP, Numerics.EXACT,
                        "parameters are updated behind the rest of the backward", UpdateOptions)
__getattr__ = loads_on_use(__name__)
