"""Process groups under chosen names, so that a printed graph finds the groups that it names.

Source: torch/csrc/distributed/c10d/GroupRegistry.cpp, through its Python binding.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch._inductor.fx_passes.bucketing  # registers the operators of bucketed collectives
import torch.distributed as dist
import torch.distributed._symmetric_memory  # noqa: F401  registers operators that send while they multiply
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import _resolve_process_group

import workbench.torch_api.inductor.bucket_copies  # noqa: F401  registers the copy into a bucket


def name_groups(sizes: dict[str, int]) -> None:
    """For each name, make a group of ranks 0 to size - 1. A group that had the name loses it."""
    made: dict[Any, Any] = {name: dist.new_group(list(range(size))) for name, size in sizes.items()}
    for name, group in made.items():  # after all are made, since torch may number one of them with such a name
        _name(name, group)


def alias_groups(groups: dict[str, str]) -> None:
    """Let each of these names find the process group that has the name on its right. A group that had it loses it."""
    for name, group in groups.items():
        _name(name, _resolve_process_group(group))  # type: ignore[arg-type]


def _name(name: Any, group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        _unregister_process_group(name)
    _register_process_group(name, group)
