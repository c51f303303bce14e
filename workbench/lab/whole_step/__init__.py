"""fused_clip_adamw: clipping scales each gradient inside the update, and no pass over the gradients is left for it.

    >>> example("fused_clip_adamw", lambda x, weight: x @ weight, graph="step")
    before:
      ...
      mul_1: float32 [4, 4] = aten.mul.Tensor(mm_1, clamp)
      add_: float32 [] = aten.add_.Tensor(step, 1)
      _fused_adamw_: not recorded = aten._fused_adamw_.tensor_lr([primals_1], [mul_1], [exp_avg_0], ...
      return (sum_1, _to_copy_1)
    after:
      ...
      add_: float32 [] = aten.add_.Tensor(step, 1)
      reciprocal_default: float32 [] = aten.reciprocal(clamp)
      _fused_adamw_: not recorded = aten._fused_adamw_.tensor_lr([primals_1], [mm_1], [exp_avg_0], ...
      return (sum_1, _to_copy_1)

The norm stays behind the backward, and reads each gradient once. Moving it behind each bucket's reduction would save no
memory traffic: views unpack a bucket, so no kernel's read could be shared. It could hide at most what the norm
takes, 0.6% of a step in docs/results.md.
"""

from workbench.recipe.contracts import Numerics, PassContract, Stage, declare

declare(PassContract(
    "fused_clip_adamw", Stage.STEP, Numerics.LOSSY, "clipping is part of the update",
    tolerance=1e-6,
    code="workbench.lab.whole_step.transform",
))
