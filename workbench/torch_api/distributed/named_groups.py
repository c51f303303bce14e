"""Process groups under names of our choosing, so that a printed graph finds the groups it names.

Source: torch/csrc/distributed/c10d/GroupRegistry.cpp, through its Python binding.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch._inductor.fx_passes.bucketing  # noqa: F401  registers the operators of bucketed collectives
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group


def name_groups(sizes: dict[str, int]) -> None:
    """For each name, make ranks 0 to size - 1 a group; a group that had the name before loses it."""
    made: dict[Any, Any] = {name: dist.new_group(list(range(size))) for name, size in sizes.items()}
    for name, group in made.items():  # after all are made: torch's own numbers for them may be among the names
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(name)
        _register_process_group(name, group)
