"""Process groups under names of our choosing, so that a printed graph finds the groups it names.

Source: torch/csrc/distributed/c10d/GroupRegistry.cpp, through its Python binding.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch._inductor.fx_passes.bucketing  # noqa: F401  registers the operators of bucketed collectives
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group


def name_group(name: str, size: int) -> None:
    """Make ranks 0 to `size` - 1 the group `name`; a group that had the name before loses it."""
    group: Any = dist.new_group(list(range(size)))
    key: Any = name
    with contextlib.suppress(RuntimeError):
        _unregister_process_group(key)
    _register_process_group(key, group)
