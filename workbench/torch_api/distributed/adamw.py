"""AdamW's operators on shards, for which DTensor's rules for lists are slow, and the fused one on fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from workbench.torch_api.restoring import shard_of

STATE = ("exp_avg", "exp_avg_sq")
FUSED = torch.ops.aten._fused_adamw_.tensor_lr
_ATEN = torch.library.Library("aten", "IMPL")
if not torch._C._dispatch_has_kernel_for_dispatch_key(FUSED.name(), "Meta"):
    # or a fake mode runs it on real zeros: the model's size four times, at each tracing and each lowering
    _ATEN.impl("_fused_adamw_.tensor_lr", lambda *_, **__: None, "Meta")


def scalar_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the step count or the learning rate: the fused AdamW of a CPU reads the latter in float64."""
    return torch.float64 if name == "lr" and device.type == "cpu" else torch.float32


class ShardedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose operators run on each rank's shards, with the same bits and the same state.

    AdamW is elementwise, so no shard needs another. Gradients that lie otherwise than their parameters are left to
    DTensor.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        parameters, gradients = lists[:2]
        if all(map(same_layout, parameters, gradients)):
            for tensors in lists:
                tensors[:] = map(shard_of, tensors)
        return has_complex


def same_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are plain tensors, or DTensors of one mesh with the same placements."""
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return not isinstance(one, DTensor) and not isinstance(other, DTensor)
    return one.device_mesh == other.device_mesh and one.placements == other.placements
